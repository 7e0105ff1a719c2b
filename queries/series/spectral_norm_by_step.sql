-- Largest singular value of each weight matrix, as a bracket.
-- Source: tensors of kind weight; lower bound by power iteration, certified upper bound where computed.
CREATE OR REPLACE MACRO spectral_norm_by_step() AS TABLE
SELECT
    tensors.run, -- run directory
    step, -- optimizer updates
    name, -- dotted name of the weight
    CAST(spectral_norm AS DOUBLE) AS spectral_norm, -- as tensor, lower bound
    CAST(spectral_norm_upper AS DOUBLE) AS spectral_norm_upper -- as tensor, upper bound; null where not certified
FROM tensors
JOIN tensor_names USING (run, rank, segment, tensor_id)
WHERE kind = 'weight' AND rank = 0 AND spectral_norm IS NOT NULL
ORDER BY tensors.run, step, tensor_id;
