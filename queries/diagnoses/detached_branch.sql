-- Does a trainable weight get no gradient at all while others do?
-- Source: exact zeros. A tensor that takes part in the loss has some element with a gradient that is not 0.0.
-- Fewer steps than the threshold may be a zero-initialised residual output, which opens after its first update.
CREATE OR REPLACE MACRO detached_branch(
    least_row_count := 3 -- recorded steps in a row
) AS TABLE
WITH gradients AS (
    SELECT
        run, segment, step, tensor_id,
        has_gradient IS FALSE OR (
            l2_norm = 0 AND coalesce(nan_count, 0) = 0
            AND coalesce(positive_infinity_count, 0) + coalesce(negative_infinity_count, 0) = 0
        ) AS is_zero
    FROM tensors
    WHERE kind = 'gradient' AND rank = 0 AND (has_gradient IS FALSE OR l2_norm IS NOT NULL)
),
judged AS (
    SELECT
        run, segment, step, tensor_id,
        is_zero AND bool_or(NOT is_zero) OVER (PARTITION BY run, segment, step) AS is_alone
    FROM gradients
),
numbered AS (
    SELECT
        run, segment, step, tensor_id, is_alone,
        count(*) FILTER (WHERE NOT is_alone) OVER (PARTITION BY run, segment, tensor_id ORDER BY step) AS stretch
    FROM judged
    WHERE tensor_id IN (SELECT tensor_id FROM judged WHERE is_alone)
),
stretches AS (
    SELECT run, segment, tensor_id, min(step) AS start_step, max(step) AS end_step, count(*) AS zero_count
    FROM numbered
    WHERE is_alone
    GROUP BY run, segment, tensor_id, stretch
    HAVING count(*) >= any_value(least_row_count)
)
SELECT
    stretches.run, -- run directory
    start_step AS first_step, -- optimizer updates
    max(end_step) AS last_step, -- optimizer updates
    arg_min(name, tensor_id) || CASE WHEN count(*) > 1 THEN format(' and {} more', count(*) - 1) ELSE '' END
        AS subject, -- tensors that lost their gradient at the same step
    CAST(max(zero_count) AS DOUBLE) AS observed, -- recorded steps in a row without gradient
    any_value(CAST(least_row_count AS DOUBLE)) AS threshold, -- steps
    format(
        'no gradient from step {} to {}, so that at most weight decay moves: {}', start_step, max(end_step),
        array_to_string(list(name ORDER BY tensor_id)[1:6], ', ') || CASE WHEN count(*) > 6 THEN ', ...' ELSE '' END
    ) AS detail -- text
FROM stretches
JOIN tensor_names USING (run, segment, tensor_id)
WHERE trainable IS DISTINCT FROM false AND tensor_names.rank = 0
GROUP BY stretches.run, start_step
ORDER BY stretches.run, start_step;
