-- How far the applied learning rate is from the declared plan, relative to the plan's peak.
-- Source: steps, rank 0. The peak is the manifest's where it declares one, else the largest planned rate so far.
CREATE OR REPLACE MACRO plan_deviation_by_step() AS TABLE
WITH rates AS (
    SELECT
        steps.run, segment, step, learning_rate, planned_learning_rate,
        coalesce(
            TRY_CAST(json_extract_string(planned_schedule, '$.peak') AS DOUBLE),
            max(planned_learning_rate) FILTER (WHERE isfinite(planned_learning_rate)) OVER (PARTITION BY steps.run)
        ) AS peak
    FROM steps
    JOIN runs ON runs.run = steps.run
    WHERE rank = 0
)
SELECT
    run, -- run directory
    segment, -- index of the segment that logged the step
    step, -- optimizer updates before the one that used this rate
    learning_rate, -- 1, finite
    planned_learning_rate, -- 1, finite
    peak, -- 1, largest rate of the plan
    abs(learning_rate - planned_learning_rate) / nullif(peak, 0) AS deviation -- 1, share of the peak
FROM rates
WHERE isfinite(learning_rate) AND isfinite(planned_learning_rate)
ORDER BY run, step;
