-- Does training start at a high learning rate although the plan declares a ramp?
-- Source: the plan against the first applied rate. Adam's first update is proportional to the rate, whatever the
-- gradient (Kingma & Ba 2015), which is what a ramp is for (Goyal et al. 2017). A rate that stays constant while the
-- plan has begun to decay is no missing ramp, no schedule is wired at all: schedule_not_followed.
CREATE OR REPLACE MACRO warmup_missing(
    share_threshold := 0.2 -- 1, share of the planned peak; the ramp of the reference plan starts at 0.01
) AS TABLE
WITH rates AS (
    SELECT
        run, step, learning_rate, planned_learning_rate, peak,
        arg_max(step, planned_learning_rate) OVER (PARTITION BY run) AS peak_step
    FROM plan_deviation_by_step()
),
schedules AS (
    SELECT
        run,
        min(step) AS first_step,
        arg_min(learning_rate, step) AS first_rate,
        arg_min(planned_learning_rate, step) AS planned_first_rate,
        any_value(peak) AS peak,
        any_value(peak_step) AS peak_step,
        min(step) FILTER (WHERE step > 0 AND abs(learning_rate - planned_learning_rate) <= 0.1 * peak)
            AS rejoined_step,
        max(learning_rate) - min(learning_rate) <= 1e-6 * any_value(peak)
            AND count(*) FILTER (WHERE step > peak_step AND planned_learning_rate < 0.999 * peak) > 0
            AS is_constant
    FROM rates
    GROUP BY run
)
SELECT
    run, -- run directory
    first_step, -- optimizer updates
    greatest(coalesce(rejoined_step, peak_step) - 1, 0) AS last_step, -- optimizer updates, before plan and rate meet
    'learning_rate' AS subject, -- quantity
    first_rate / peak AS observed, -- 1, first applied rate as a share of the planned peak
    CAST(share_threshold AS DOUBLE) AS threshold, -- 1
    format(
        'the first update uses {:.4g}, {:.0f}% of the planned peak {:.4g}; the plan starts at {:.4g}',
        first_rate, 100 * first_rate / peak, peak, planned_first_rate
    ) AS detail -- text
FROM schedules
WHERE first_step = 0
    AND first_rate > share_threshold * peak
    AND planned_first_rate <= share_threshold * peak
    AND NOT is_constant
ORDER BY run;
