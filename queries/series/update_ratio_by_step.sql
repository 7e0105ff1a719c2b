-- How far one update moves each weight matrix, relative to the matrix: |w_(s+1) - w_s| / |w_s|.
-- Source: tensors of kinds update and weight. Vectors (norms, biases) and all-zero matrices are left out.
CREATE OR REPLACE MACRO update_ratio_by_step() AS TABLE
SELECT
    change.run, -- run directory
    change.step, -- optimizer updates before the update
    name, -- dotted name of the weight
    change.l2_norm / nullif(weight.l2_norm, 0) AS update_ratio -- 1
FROM tensors AS change
JOIN tensors AS weight USING (run, rank, segment, step, tensor_id)
JOIN tensor_names USING (run, rank, segment, tensor_id)
WHERE change.kind = 'update'
    AND weight.kind = 'weight'
    AND rank = 0
    AND weight.l2_norm > 0
    AND shape LIKE '%,%' -- two axes or more
ORDER BY change.run, change.step, tensor_id;
