-- Are the updates small against the weights, at the peak rate or far below the rate that the manifest declares?
-- Source: an update of a thousandth of the weights is usual (Karpathy 2015, CS231n notes). Small updates alone are no
-- fault, a ramp and a cosine tail have them too. So either they are made near the run's own peak rate while every
-- gradient still agrees with the one before, which says that the updates change nothing; or the loop follows a plan of
-- its own that lies far below the declared one. A rate that leaves the loop's own plan is schedule_not_followed.
CREATE OR REPLACE MACRO learning_rate_too_low(
    ratio_threshold := 0.002, -- 1, median over matrices of |update| / |weight|; 0.007 at the reference peak
    cosine_threshold := 0.4, -- -1..1, median with the gradient before; 0.2 in healthy runs by step 100
    peak_share := 0.9, -- 1, share of the largest rate so far
    plan_share := 0.2, -- 1, share of the declared rate
    window_rows := 25, -- steps at that rate
    least_step := 50 -- optimizer updates; healthy gradients agree for the first twenty steps
) AS TABLE
WITH rates AS (
    SELECT
        run, step, learning_rate, gradient_cosine_previous,
        max(learning_rate) FILTER (WHERE isfinite(learning_rate)) OVER (PARTITION BY run) AS peak
    FROM steps
    WHERE rank = 0
),
at_peak AS (
    SELECT
        run, step, learning_rate,
        median(gradient_cosine_previous) OVER last_rows AS cosine,
        count(*) OVER last_rows AS row_count,
        min(step) OVER last_rows AS window_step
    FROM rates
    WHERE learning_rate >= peak_share * peak AND step >= least_step AND isfinite(gradient_cosine_previous)
    WINDOW last_rows AS (PARTITION BY run ORDER BY step ROWS BETWEEN window_rows - 1 PRECEDING AND CURRENT ROW)
),
ratios AS (
    SELECT run, step, median(update_ratio) FILTER (WHERE isfinite(update_ratio)) AS ratio
    FROM update_ratio_by_step()
    GROUP BY run, step
),
agreeing AS (
    SELECT
        run, window_step, step, learning_rate,
        format('near its peak; consecutive gradients have a median cosine of {:.2f}', cosine) AS reason
    FROM at_peak
    WHERE row_count = window_rows AND cosine > cosine_threshold
),
compared AS (
    SELECT
        run, step, learning_rate, declared_rate,
        learning_rate < plan_share * declared_rate
            AND abs(learning_rate - planned_learning_rate) <= 0.01 * declared_rate AS is_below
    FROM declared_rate_by_step()
),
stretches AS (
    SELECT
        run, step, learning_rate, declared_rate,
        count(*) FILTER (WHERE is_below) OVER last_rows AS below_count,
        min(step) OVER last_rows AS window_step
    FROM compared
    WINDOW last_rows AS (PARTITION BY run ORDER BY step ROWS BETWEEN window_rows - 1 PRECEDING AND CURRENT ROW)
),
below_plan AS (
    SELECT
        run, window_step, step, learning_rate,
        format('where the manifest declares {:.3g}', declared_rate) AS reason
    FROM stretches
    WHERE below_count = window_rows AND window_step >= least_step
),
slow AS (
    SELECT candidates.run, window_step, candidates.step, learning_rate, reason, max(ratio) AS ratio
    FROM (FROM agreeing UNION ALL FROM below_plan) AS candidates
    JOIN ratios ON ratios.run = candidates.run AND ratios.step BETWEEN window_step AND candidates.step
    GROUP BY ALL
    HAVING max(ratio) < any_value(ratio_threshold)
)
SELECT
    run, -- run directory
    min(window_step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    'update ratio' AS subject, -- quantity
    arg_min(ratio, step) AS observed, -- 1, median over matrices, largest of the first such window
    any_value(CAST(ratio_threshold AS DOUBLE)) AS threshold, -- 1
    format(
        'updates of {:.3g} of the weights at a learning rate of {:.3g}, ', arg_min(ratio, step),
        arg_min(learning_rate, step)
    ) || arg_min(reason, step) AS detail -- text
FROM slow
GROUP BY run
ORDER BY run;
