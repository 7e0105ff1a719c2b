-- Are the updates small against the weights at the peak rate, while every gradient still points the same way?
-- Source: an update of a thousandth of the weights is usual (Karpathy 2015, CS231n notes). A gradient that agrees with
-- the one before says that the update changed nothing. Rates are compared near the run's own peak, so that neither the
-- ramp nor the cosine tail counts.
CREATE OR REPLACE MACRO learning_rate_too_low(
    ratio_threshold := 0.002, -- 1, median over matrices of |update| / |weight|; 0.007 at the reference peak
    cosine_threshold := 0.4, -- -1..1, median with the gradient before; 0.2 in healthy runs by step 100
    peak_share := 0.9, -- 1, share of the largest rate so far
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
slow AS (
    SELECT at_peak.run, window_step, at_peak.step, learning_rate, cosine, max(ratio) AS ratio
    FROM at_peak
    JOIN ratios ON ratios.run = at_peak.run AND ratios.step BETWEEN window_step AND at_peak.step
    WHERE row_count = window_rows AND cosine > cosine_threshold
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
        'updates of {:.3g} of the weights at a learning rate of {:.3g}, near its peak; consecutive gradients have '
        || 'a median cosine of {:.2f}', arg_min(ratio, step), arg_min(learning_rate, step), arg_min(cosine, step)
    ) AS detail -- text
FROM slow
GROUP BY run
ORDER BY run;
