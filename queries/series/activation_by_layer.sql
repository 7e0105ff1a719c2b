-- Size of each module's output over training, in the order of the forward pass.
-- Source: tensors of kind activation over real tokens, finite elements only, rank 0.
CREATE OR REPLACE MACRO activation_by_layer() AS TABLE
WITH activations AS (
    SELECT
        run, rank, segment, step, tensor_id, element_count, l2_norm, mean_abs,
        coalesce(nan_count, 0) + coalesce(positive_infinity_count, 0)
            + coalesce(negative_infinity_count, 0) AS nonfinite_count
    FROM tensors
    WHERE kind = 'activation' AND rank = 0
)
SELECT
    activations.run, -- run directory
    step, -- optimizer updates
    module, -- dotted name of the module
    layer, -- index of the block; null outside the blocks
    role, -- what the module is
    CAST(mean_abs AS DOUBLE) AS mean_abs, -- as tensor, mean |a| over finite elements
    l2_norm / sqrt(nullif(element_count - nonfinite_count, 0)) AS root_mean_square, -- as tensor, finite elements
    nonfinite_count -- elements that are NaN or infinite
FROM activations
JOIN tensor_names USING (run, rank, segment, tensor_id)
ORDER BY activations.run, step, tensor_id;
