-- How far ln(quantity) lies above its recent median, in robust standard deviations of its step-to-step noise.
-- Source: compared on healthy and injected runs with raw MAD, a 6-sigma window and EWMA, which did worse.
-- Base = median of the previous finite values; scale = 1.4826 MAD of the previous differences / sqrt 2, floored.
-- Differences take the descent's trend out; the point itself is outside its own windows. Windows are in rows:
-- a run that logs every k steps sees spikes of k steps and longer only. A window runs across a resume, since
-- the spike that a resume causes stands at its first rows.
CREATE OR REPLACE MACRO robust_z_by_step(
    quantity_name := 'train_loss', -- 'train_loss' or 'gradient_norm'
    baseline_rows := 16, -- rows of the median
    scale_rows := 63, -- differences of the MAD
    scale_floor := 0.02 -- ln units; a smoother curve than 2% is judged as if it had 2% of noise
) AS TABLE
WITH values_of_quantity AS (
    SELECT
        run, step,
        CASE quantity_name WHEN 'train_loss' THEN train_loss WHEN 'gradient_norm' THEN gradient_norm END AS value
    FROM steps
    WHERE rank = 0
),
logarithms AS (
    SELECT run, step, value, ln(CASE WHEN isfinite(value) AND value > 0 THEN value END) AS y
    FROM values_of_quantity
    WHERE isfinite(value) AND value > 0
),
differences AS (
    SELECT run, step, value, y, y - lag(y) OVER (PARTITION BY run ORDER BY step) AS difference
    FROM logarithms
),
windows AS (
    SELECT
        run, step, value, y,
        count(*) OVER past AS past_count,
        median(y) OVER recent AS baseline,
        greatest(1.4826 * (mad(difference) OVER noise) / sqrt(2), scale_floor) AS scale
    FROM differences
    WINDOW
        past AS (PARTITION BY run ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
        recent AS (PARTITION BY run ORDER BY step ROWS BETWEEN baseline_rows PRECEDING AND 1 PRECEDING),
        noise AS (PARTITION BY run ORDER BY step ROWS BETWEEN scale_rows PRECEDING AND 1 PRECEDING)
)
SELECT
    run, -- run directory
    step, -- optimizer updates
    value, -- unit of the quantity; finite and positive rows only
    exp(baseline) AS baseline, -- unit of the quantity
    y - baseline AS prominence, -- ln units above the baseline
    CAST((y - baseline) / scale AS DOUBLE) AS z, -- robust standard deviations
    past_count -- finite rows before this one
FROM windows
ORDER BY run, step;
