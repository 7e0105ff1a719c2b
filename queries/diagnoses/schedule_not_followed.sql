-- Is the learning rate that was applied another one than the declared schedule asks for?
-- Source: plan and rate are logged row by row; both come from one float64 formula, so that equal means equal.
CREATE OR REPLACE MACRO schedule_not_followed(
    -- A plan that is written down in float32 differs by up to 2^-24 = 6e-8 of the peak; sixteenfold that.
    deviation_threshold := 1e-6 -- 1, share of the planned peak
) AS TABLE
WITH deviations AS (
    SELECT
        run, step, learning_rate, planned_learning_rate, deviation,
        count(*) OVER (PARTITION BY run) AS row_count,
        max(learning_rate) OVER (PARTITION BY run) - min(learning_rate) OVER (PARTITION BY run) AS applied_range,
        max(planned_learning_rate) OVER (PARTITION BY run)
            - min(planned_learning_rate) OVER (PARTITION BY run) AS planned_range,
        learning_rate / nullif(planned_learning_rate, 0) AS factor
    FROM plan_deviation_by_step()
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    'learning_rate' AS subject, -- quantity
    max(deviation) AS observed, -- 1, largest deviation as a share of the peak
    any_value(CAST(deviation_threshold AS DOUBLE)) AS threshold, -- 1
    format(
        '{:.4g} applied against {:.4g} planned at step {}, where they differ most; {} of {} steps differ',
        arg_max(learning_rate, deviation), arg_max(planned_learning_rate, deviation), arg_max(step, deviation),
        count(*), any_value(row_count)
    ) || CASE
        WHEN any_value(applied_range) = 0 AND any_value(planned_range) > 0 THEN '; the applied rate is constant'
        WHEN max(factor) - min(factor) < 1e-6 * max(factor)
            THEN format('; the applied rate is {:.4g} times the planned one', max(factor))
        ELSE ''
    END AS detail -- text
FROM deviations
WHERE deviation > deviation_threshold
GROUP BY run
ORDER BY run;
