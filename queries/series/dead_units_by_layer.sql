-- Units that were zero on every real token of a whole window, per layer.
-- Source: units; with n tokens a unit called dead may still fire on less than 3/n of them (rule of three).
CREATE OR REPLACE MACRO dead_units_by_layer() AS TABLE
SELECT
    run, -- run directory
    step, -- optimizer updates, end of the window
    layer, -- index of the block
    window_steps, -- steps that the window covers
    unit_count, -- units
    dead_unit_count, -- units
    dead_unit_count / nullif(unit_count, 0) AS dead_fraction -- 0..1
FROM units
WHERE rank = 0
ORDER BY run, step, layer;
