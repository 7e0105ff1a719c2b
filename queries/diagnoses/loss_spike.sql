-- Did the training loss jump far above its own recent noise?
-- Source: loss_spikes. A spike is a symptom: consistent with a bad batch, a learning rate too high, a stale moment.
CREATE OR REPLACE MACRO loss_spike(
    spike_threshold := 6 -- robust standard deviations
) AS TABLE
SELECT
    run, -- run directory
    step AS first_step, -- optimizer updates
    last_step, -- optimizer updates
    'train_loss' AS subject, -- quantity
    z AS observed, -- robust standard deviations
    CAST(spike_threshold AS DOUBLE) AS threshold, -- robust standard deviations
    format('{:.3g} nats/token over a baseline of {:.3g}; ', loss, baseline)
        || coalesce(format('back at step {}', recovered_step), 'not back at the baseline so far') AS detail -- text
FROM loss_spikes(z_threshold := spike_threshold)
ORDER BY run, step;
