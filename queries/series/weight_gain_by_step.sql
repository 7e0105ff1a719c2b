-- How much each weight matrix amplifies: its root mean square times the square root of its smaller side.
-- Source: tensors of kind weight. Xavier, LeCun and He initialisation give at most sqrt 2 (Glorot & Bengio 2010; LeCun
-- et al. 1998; He et al. 2015), whichever side is the input. Embeddings look rows up and are left out.
CREATE OR REPLACE MACRO weight_gain_by_step() AS TABLE
SELECT
    tensors.run, -- run directory
    step, -- optimizer updates
    name, -- dotted name of the weight
    l2_norm, -- as tensor
    l2_norm / sqrt(greatest(
        TRY_CAST(json_extract_string(shape, '$[0]') AS DOUBLE), TRY_CAST(json_extract_string(shape, '$[1]') AS DOUBLE)
    )) AS gain, -- 1
    l2_norm / nullif(first_value(l2_norm) OVER (PARTITION BY tensors.run, name ORDER BY step), 0)
        AS relative_norm -- 1, norm / norm at the first recorded step; null where that is 0
FROM tensors
JOIN tensor_names USING (run, rank, segment, tensor_id)
WHERE kind = 'weight'
    AND rank = 0
    AND role <> 'embedding'
    AND json_array_length(shape) = 2
    AND isfinite(l2_norm)
ORDER BY tensors.run, step, tensor_id;
