-- Did any recorded quantity turn NaN or infinite, and which was first?
-- Source: first_nonfinite: order parameter, activation, loss, gradient. A count is exact, so one is proof.
CREATE OR REPLACE MACRO nonfinite_value(
    element_count_threshold := 0 -- elements
) AS TABLE
WITH origins AS (
    SELECT
        run, step, source, subject, kind, nan_count, infinity_count,
        order_in_step,
        count(*) OVER (PARTITION BY run) AS quantity_count
    FROM first_nonfinite()
),
last_steps AS (
    SELECT run, max(step) AS last_step FROM nonfinite_steps() GROUP BY run
)
SELECT
    run, -- run directory
    step AS first_step, -- optimizer updates
    last_step, -- optimizer updates
    CASE source
        WHEN 'tensors' THEN format('{} of {}', kind, subject)
        WHEN 'steps' THEN subject
        ELSE format('{} of split {}', kind, subject)
    END AS subject, -- the first quantity in the order in which a step computes them
    CAST(nan_count + infinity_count AS DOUBLE) AS observed, -- elements
    CAST(element_count_threshold AS DOUBLE) AS threshold, -- elements
    format(
        '{} NaN and {} infinite elements; {} recorded quantities are not finite at step {}',
        nan_count, infinity_count, quantity_count, step
    ) AS detail -- text
FROM origins
JOIN last_steps USING (run)
WHERE order_in_step = 1 AND nan_count + infinity_count > element_count_threshold
ORDER BY run;
