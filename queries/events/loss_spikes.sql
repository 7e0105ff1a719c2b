-- Sudden rises of the training loss above its recent level; a non-finite loss is first_nonfinite's.
-- Source: calibrated on a replica of the reference model: no event on 6 healthy runs x 800 steps (at most 6.2 per
-- 10,000 steps at 95%), every injected rise of 100% found, 79% of those of 50%.
CREATE OR REPLACE MACRO loss_spikes(
    z_threshold := 6, -- robust standard deviations
    prominence_threshold := 0.10, -- ln units above the baseline
    excess_threshold := 0.02, -- nats/token above the baseline; near zero loss a large ratio is still nothing
    minimum_past_rows := 20, -- finite rows before a point can be judged
    merge_steps := 10 -- steps; spikes closer than this are one event
) AS TABLE
WITH points AS (
    SELECT run, step, value, baseline, prominence, z, past_count
    FROM robust_z_by_step(quantity_name := 'train_loss')
),
spikes AS (
    SELECT
        run, step, value, baseline, z,
        step - lag(step) OVER (PARTITION BY run ORDER BY step) AS steps_since_previous
    FROM points
    WHERE z > z_threshold
        AND prominence > prominence_threshold
        AND value - baseline > excess_threshold
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
        max(value) AS loss,
        arg_min(baseline, step) AS baseline,
        max(z) AS z
    FROM numbered_spikes
    GROUP BY run, event
),
recoveries AS (
    SELECT events.run, events.step, min(points.step) AS recovered_step
    FROM events
    JOIN points ON points.run = events.run
        AND points.step > events.last_step
        AND points.value <= events.baseline * exp(prominence_threshold)
    GROUP BY events.run, events.step
)
SELECT
    events.run, -- run directory
    events.step, -- optimizer updates, first step of the spike
    events.last_step, -- optimizer updates, last step that is still a spike
    events.loss, -- nats/token, highest of the spike
    events.baseline, -- nats/token before the spike
    events.z, -- robust standard deviations, highest of the spike
    recoveries.recovered_step -- optimizer updates, first step back at the baseline; null: never came back
FROM events
LEFT JOIN recoveries USING (run, step)
ORDER BY events.run, events.step;
