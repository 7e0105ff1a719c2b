-- Did one batch have a far higher loss than its neighbours, with the model unharmed right after?
-- Source: loss_spikes that are over within a few steps. Consistent with wrong examples; a batch is judged by a state of
-- the weights, so replay it on another checkpoint before calling the data bad.
CREATE OR REPLACE MACRO bad_batch(
    spike_threshold := 6, -- robust standard deviations
    recovery_steps := 3 -- steps until the loss is back
) AS TABLE
WITH batches AS (
    SELECT step, run, batch_hash, epoch, data_position FROM steps WHERE rank = 0 AND batch_hash IS NOT NULL
)
SELECT
    spikes.run, -- run directory
    spikes.step AS first_step, -- optimizer updates
    spikes.last_step, -- optimizer updates
    format('batch {:x}', batch_hash) AS subject, -- hash of the batch
    z AS observed, -- robust standard deviations of the loss
    CAST(spike_threshold AS DOUBLE) AS threshold, -- robust standard deviations
    format('{:.3g} nats/token over a baseline of {:.3g}, back at step {}', loss, baseline, recovered_step)
        || coalesce(format('; epoch {} from position {}', epoch, data_position), '') AS detail -- text
FROM loss_spikes(z_threshold := spike_threshold) AS spikes
JOIN batches ON batches.run = spikes.run AND batches.step = spikes.step
WHERE recovered_step - spikes.step <= recovery_steps
ORDER BY spikes.run, spikes.step;
