-- Sudden rises of the global gradient norm above its recent level, before clipping.
-- Source: the rule of loss_spikes on ln G with prominence ln 2: healthy norms double by chance, losses do not.
CREATE OR REPLACE MACRO gradient_norm_spikes(
    z_threshold := 6, -- robust standard deviations
    prominence_threshold := 0.6931471805599453, -- ln units above the baseline
    minimum_past_rows := 20, -- finite rows before a point can be judged
    merge_steps := 10 -- steps; spikes closer than this are one event
) AS TABLE
WITH points AS (
    SELECT run, step, value, baseline, prominence, z, past_count
    FROM robust_z_by_step(quantity_name := 'gradient_norm')
),
spikes AS (
    SELECT
        run, step, value, baseline, z,
        step - lag(step) OVER (PARTITION BY run ORDER BY step) AS steps_since_previous
    FROM points
    WHERE z > z_threshold
        AND prominence > prominence_threshold
        AND past_count >= minimum_past_rows
),
numbered_spikes AS (
    SELECT
        run, step, value, baseline, z,
        count(*) FILTER (WHERE coalesce(steps_since_previous > merge_steps, true)) OVER (
            PARTITION BY run ORDER BY step ROWS UNBOUNDED PRECEDING
        ) AS event
    FROM spikes
),
events AS (
    SELECT
        run,
        min(step) AS step,
        max(step) AS last_step,
        max(value) AS gradient_norm,
        arg_min(baseline, step) AS baseline,
        max(z) AS z
    FROM numbered_spikes
    GROUP BY run, event
)
SELECT
    run, -- run directory
    step, -- optimizer updates, first step of the spike
    last_step, -- optimizer updates, last step that is still a spike
    gradient_norm, -- objective/weight, highest of the spike
    baseline, -- objective/weight before the spike
    z -- robust standard deviations, highest of the spike
FROM events
ORDER BY run, step;
