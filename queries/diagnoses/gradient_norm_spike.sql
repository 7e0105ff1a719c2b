-- Did the gradient norm jump far above its own recent noise?
-- Source: gradient_norm_spikes, at fourfold instead of twofold: norms double by chance while a model leaves its first
-- plateau. An anomaly: consistent with a bad batch, a learning rate too high, a stale moment.
CREATE OR REPLACE MACRO gradient_norm_spike(
    spike_threshold := 6, -- robust standard deviations
    rise_threshold := 4 -- 1, norm / baseline; up to 2.4 on the tuning seeds where nothing was wrong
) AS TABLE
SELECT
    run, -- run directory
    step AS first_step, -- optimizer updates
    last_step, -- optimizer updates
    'gradient_norm' AS subject, -- quantity
    z AS observed, -- robust standard deviations
    CAST(spike_threshold AS DOUBLE) AS threshold, -- robust standard deviations
    format('{:.3g} over a baseline of {:.3g}', gradient_norm, baseline) AS detail -- text
FROM gradient_norm_spikes(z_threshold := spike_threshold, prominence_threshold := ln(rise_threshold))
ORDER BY run, step;
