-- Since when the updates are large against the weights, and how large they get: one row per run that has a stretch.
-- Source: an update of a thousandth of the weights is usual, of a hundredth large (Karpathy 2015, CS231n notes). Any
-- update is large against a matrix far below the usual size, so that such a matrix counts as one of least_gain.
CREATE OR REPLACE MACRO large_updates(
    ratio_threshold := 0.01, -- 1, median over matrices of |update| / |weight|; 0.007 at the reference peak
    window_rows := 5, -- recorded updates in a row above it
    least_gain := 0.3 -- 1, of a matrix: 1 by the usual initialisations, 0.25 and more in the reference
) AS TABLE
WITH ratios AS (
    SELECT
        run, step,
        median(update_ratio * least(1, coalesce(gain, 1) / least_gain)) FILTER (WHERE isfinite(update_ratio)) AS ratio
    FROM update_ratio_by_step()
    LEFT JOIN weight_gain_by_step() USING (run, step, name)
    GROUP BY run, step
),
windows AS (
    SELECT
        run, step, ratio,
        min(ratio) OVER last_rows AS least_ratio,
        count(*) OVER last_rows AS row_count,
        min(step) OVER last_rows AS window_step
    FROM ratios
    WINDOW last_rows AS (PARTITION BY run ORDER BY step ROWS BETWEEN window_rows - 1 PRECEDING AND CURRENT ROW)
)
SELECT
    run, -- run directory
    min(window_step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    max(ratio) AS ratio, -- 1, largest median over matrices at the end of such a window
    arg_max(step, ratio) AS ratio_step -- optimizer updates
FROM windows
WHERE least_ratio > ratio_threshold AND row_count = window_rows
GROUP BY run
ORDER BY run;
