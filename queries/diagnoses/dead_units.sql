-- Are many units of a layer silent on every token of a window of at least an epoch?
-- Source: a unit that is zero on all n tokens fires on less than 3/n of them with 95% confidence (Hanley &
-- Lippman-Hand 1983). A window shorter than an epoch has not asked every example.
CREATE OR REPLACE MACRO dead_units(
    share_threshold := 0.1 -- 1, dead units / units of the layer; 0 in the reference model
) AS TABLE
WITH epochs AS (
    SELECT run, epoch, count(*) AS step_count FROM steps WHERE rank = 0 AND epoch IS NOT NULL GROUP BY run, epoch
),
epoch_lengths AS (
    SELECT run, max(step_count) AS epoch_steps FROM epochs GROUP BY run
),
windows AS (
    SELECT
        units.run, units.step, units.layer, units.window_steps, unit_count, dead_unit_count, token_count,
        dead_unit_count / nullif(unit_count, 0) AS share
    FROM units
    LEFT JOIN epoch_lengths ON epoch_lengths.run = units.run
    WHERE rank = 0 AND units.window_steps >= coalesce(epoch_steps, 1)
)
SELECT
    run, -- run directory
    min(step - window_steps + 1) AS first_step, -- optimizer updates, start of the first such window
    max(step) AS last_step, -- optimizer updates
    format('layer {}', layer) AS subject, -- block
    max(share) AS observed, -- 1, dead units / units
    any_value(CAST(share_threshold AS DOUBLE)) AS threshold, -- 1
    format(
        '{} of {} units zero on all {} tokens of the {} steps to step {}; each fires on less than {:.2g} of tokens',
        arg_max(dead_unit_count, share), arg_max(unit_count, share), arg_max(token_count, share),
        arg_max(window_steps, share), arg_max(step, share), 3 / arg_max(token_count, share)
    ) AS detail -- text
FROM windows
WHERE share > share_threshold
GROUP BY run, layer
ORDER BY run, layer;
