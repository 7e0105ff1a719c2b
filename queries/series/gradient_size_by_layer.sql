-- Root mean square of the weight gradients of each block, and how it compares with the largest of the step.
-- Source: tensors of kind gradient, finite ones, weighted by elements; before clipping; rank 0.
CREATE OR REPLACE MACRO gradient_size_by_layer() AS TABLE
WITH sizes AS (
    SELECT
        tensors.run, step, layer,
        sqrt(sum(l2_norm * l2_norm) / nullif(sum(element_count), 0)) AS root_mean_square
    FROM tensors
    JOIN tensor_names USING (run, rank, segment, tensor_id)
    WHERE kind = 'gradient' AND rank = 0 AND layer IS NOT NULL AND isfinite(l2_norm)
    GROUP BY tensors.run, step, layer
)
SELECT
    run, -- run directory
    step, -- optimizer updates
    layer, -- index of the block
    root_mean_square, -- objective/weight
    root_mean_square / nullif(max(root_mean_square) OVER (PARTITION BY run, step), 0) AS share -- 0..1, of the largest
FROM sizes
ORDER BY run, step, layer;
