-- How strongly the loss pulls on each module's output, relative to the output's own size.
-- Source: RMS(dL/da) / RMS(a) over real tokens, finite elements only; read it against the run's own step 0.
CREATE OR REPLACE MACRO gradient_activation_ratio_by_layer() AS TABLE
WITH counts AS (
    SELECT
        run, rank, segment, step, tensor_id, kind, element_count, l2_norm,
        coalesce(nan_count, 0) + coalesce(positive_infinity_count, 0)
            + coalesce(negative_infinity_count, 0) AS nonfinite_count
    FROM tensors
    WHERE kind IN ('activation', 'activation_gradient') AND rank = 0
),
sizes AS (
    SELECT
        run, rank, segment, step, tensor_id, kind, nonfinite_count,
        l2_norm / sqrt(nullif(element_count - nonfinite_count, 0)) AS root_mean_square
    FROM counts
)
SELECT
    gradient.run, -- run directory
    gradient.step, -- optimizer updates
    module, -- dotted name of the module
    layer, -- index of the block; null outside the blocks
    gradient.root_mean_square / nullif(activation.root_mean_square, 0) AS ratio, -- 1; null for an all-zero output
    gradient.nonfinite_count + activation.nonfinite_count AS nonfinite_count -- elements of both, NaN or infinite
FROM sizes AS gradient
JOIN sizes AS activation USING (run, rank, segment, step, tensor_id)
JOIN tensor_names USING (run, rank, segment, tensor_id)
WHERE gradient.kind = 'activation_gradient' AND activation.kind = 'activation'
ORDER BY gradient.run, gradient.step, tensor_id;
