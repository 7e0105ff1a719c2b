-- Do weight matrices start at exactly zero and get no gradient that could move them?
-- Source: exact zeros. One zero matrix in a product opens after an update of the other; two in a row never do.
-- A zero-initialised residual output has a gradient from step 0 on and is no fault.
CREATE OR REPLACE MACRO zero_initialisation(
    least_row_count := 3 -- recorded gradients in a row, from step 0
) AS TABLE
WITH zero_weights AS (
    SELECT run, segment, tensor_id
    FROM tensors
    WHERE kind = 'weight' AND rank = 0 AND step = 0 AND l2_norm = 0 AND coalesce(nan_count, 0) = 0
),
gradients AS (
    SELECT
        tensors.run, segment, tensor_id, step,
        count(*) FILTER (WHERE has_gradient IS NOT FALSE AND l2_norm > 0) OVER (
            PARTITION BY tensors.run, segment, tensor_id ORDER BY step
        ) AS moved_count
    FROM tensors
    JOIN zero_weights USING (run, segment, tensor_id)
    WHERE kind = 'gradient' AND rank = 0 AND (has_gradient IS FALSE OR l2_norm IS NOT NULL)
),
stuck AS (
    SELECT run, segment, tensor_id, max(step) AS end_step, count(*) AS row_count
    FROM gradients
    WHERE moved_count = 0
    GROUP BY run, segment, tensor_id
    HAVING count(*) >= any_value(least_row_count)
)
SELECT
    stuck.run, -- run directory
    0 AS first_step, -- optimizer updates
    max(end_step) AS last_step, -- optimizer updates, last recorded step without a gradient
    arg_min(name, tensor_id) || CASE WHEN count(*) > 1 THEN format(' and {} more', count(*) - 1) ELSE '' END
        AS subject, -- matrices that stay zero
    CAST(max(row_count) AS DOUBLE) AS observed, -- recorded steps without a gradient
    any_value(CAST(least_row_count AS DOUBLE)) AS threshold, -- recorded steps
    format('all elements 0.0 at step 0, no gradient up to step {}: ', max(end_step))
        || array_to_string(list(name ORDER BY tensor_id)[1:6], ', ')
        || CASE WHEN count(*) > 6 THEN ', ...' ELSE '' END AS detail -- text
FROM stuck
JOIN tensor_names USING (run, segment, tensor_id)
WHERE trainable IS DISTINCT FROM false AND tensor_names.rank = 0 AND json_array_length(shape) >= 2
GROUP BY stuck.run
ORDER BY stuck.run;
