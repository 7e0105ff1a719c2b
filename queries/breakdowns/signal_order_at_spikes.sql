-- Around each loss spike: which signal left its own baseline first, the batch, and the worst examples near it.
-- Source: each signal against the median of its rows before, scaled by the noise of its differences as in
-- robust_z_by_step; it has left when it is six such deviations and a quarter away. What moves first is nearest to the
-- cause, as far as the cadence of each signal shows.
CREATE OR REPLACE MACRO signal_order_at_spikes(
    window_before_steps := 32, -- steps before the spike in which a signal may have left
    baseline_before_steps := 64, -- steps before that, which belong to the first baselines
    baseline_rows := 3, -- rows of a baseline: few, since ramps and decays move every signal
    least_past_rows := 3, -- rows before a row can be judged
    z_threshold := 6, -- robust standard deviations
    change_threshold := 0.223, -- ln units, a quarter: noise of quiet signals is no departure
    example_lag_steps := 50, -- steps between the spike and the evaluation that names the worst examples
    train_split := 'train' -- name of the split that is trained on
) AS TABLE
WITH signals AS (
    SELECT run, step, 'loss' AS signal, 'train_loss' AS subject, train_loss AS amount FROM training_loss_by_step()
    UNION ALL
    SELECT run, step, 'gradient norm', format('layer {}', layer), root_mean_square FROM gradient_size_by_layer()
    UNION ALL
    SELECT run, step, 'update ratio', name, update_ratio FROM update_ratio_by_step()
    UNION ALL
    SELECT run, step, 'activation', module, mean_abs FROM activation_by_layer()
),
spikes AS (
    SELECT run, step, recovered_step FROM loss_spikes()
),
near AS (
    SELECT
        signals.run, spikes.step, signal, subject, signals.step AS signal_step, amount, ln(amount) AS y,
        ln(amount) - lag(ln(amount)) OVER (
            PARTITION BY signals.run, spikes.step, signal, subject ORDER BY signals.step
        ) AS difference
    FROM spikes
    JOIN signals ON signals.run = spikes.run
        AND signals.step BETWEEN spikes.step - window_before_steps - baseline_before_steps AND spikes.step
    WHERE isfinite(amount) AND amount > 0
),
baselines AS (
    SELECT
        run, step, signal, subject, signal_step, amount, y,
        median(y) OVER recent AS baseline,
        greatest(1.4826 * (mad(difference) OVER past) / sqrt(2), 0.02) AS scale,
        count(*) OVER past AS past_count
    FROM near
    WINDOW
        recent AS (PARTITION BY run, step, signal, subject ORDER BY signal_step
            ROWS BETWEEN baseline_rows PRECEDING AND 1 PRECEDING),
        past AS (PARTITION BY run, step, signal, subject ORDER BY signal_step
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
departures AS (
    SELECT
        run, step, signal, subject,
        min(signal_step) AS moved_step,
        arg_min(amount, signal_step) AS moved_value,
        exp(arg_min(baseline, signal_step)) AS baseline_value
    FROM baselines
    WHERE signal_step >= step - window_before_steps
        AND past_count >= least_past_rows
        AND abs(y - baseline) > greatest(z_threshold * scale, change_threshold)
    GROUP BY run, step, signal, subject
),
evaluated AS (
    SELECT spikes.run, spikes.step, min(example_losses.step) AS evaluated_step
    FROM spikes
    JOIN example_losses ON example_losses.run = spikes.run
        AND split = train_split
        AND example_losses.step BETWEEN spikes.step AND spikes.step + example_lag_steps
    GROUP BY spikes.run, spikes.step
),
worst AS (
    SELECT
        evaluated.run, evaluated.step,
        list(format('{} ({:.3g})', example_id, loss_sum / token_count) ORDER BY loss_sum / token_count DESC)[1:3]
            AS worst_examples
    FROM evaluated
    JOIN example_losses AS losses ON losses.run = evaluated.run
        AND losses.step = evaluated.evaluated_step
        AND split = train_split
    WHERE rank = 0 AND isfinite(loss_sum) AND token_count > 0
    GROUP BY evaluated.run, evaluated.step
)
SELECT
    spikes.run, -- run directory
    spikes.step, -- optimizer updates, first step of the spike
    signal, -- loss, gradient norm, update ratio or activation
    subject, -- column, block, weight or module
    moved_step, -- optimizer updates, first row at which the signal had left its baseline
    moved_value, -- as signal, at that row
    baseline_value, -- as signal, median before
    batch_hash, -- 64-bit hash of the spike's batch
    recovered_step, -- optimizer updates, first step back at the baseline; null: never came back
    array_to_string(worst_examples, ', ') AS worst_examples -- ids with nats/token at the next evaluation
FROM spikes
LEFT JOIN departures ON departures.run = spikes.run AND departures.step = spikes.step
LEFT JOIN steps ON steps.run = spikes.run AND steps.step = spikes.step AND rank = 0
LEFT JOIN worst ON worst.run = spikes.run AND worst.step = spikes.step
ORDER BY spikes.run, spikes.step, moved_step, signal, subject;
