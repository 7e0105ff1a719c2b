-- Are the updates large against the weights, and does the run show that it suffers from it?
-- Source: an update of a thousandth of the weights is usual, of a hundredth large (Karpathy 2015, CS231n notes). Large
-- updates alone are no fault: small weights and short runs have them too. So one of three harms must be there:
-- attention has collapsed, the loss does not fall, or the gradient norm spikes again and again.
CREATE OR REPLACE MACRO learning_rate_too_high(
    ratio_threshold := 0.01, -- 1, median over matrices of |update| / |weight|; 0.007 at the reference peak
    window_rows := 5, -- recorded updates in a row above it
    entropy_threshold := 0.3, -- 0..1, mean over heads; 0.65 or more in healthy runs
    entropy_share := 0.5, -- 1, of the run's own first entropy
    slope_rows := 40, -- steps of each of the two windows whose median losses are compared
    spike_threshold := 3 -- spikes of loss or gradient norm
) AS TABLE
WITH ratios AS (
    SELECT run, step, median(update_ratio) FILTER (WHERE isfinite(update_ratio)) AS ratio
    FROM update_ratio_by_step()
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
),
large AS (
    SELECT
        run, min(window_step) AS step, max(step) AS end_step, max(ratio) AS ratio, arg_max(step, ratio) AS ratio_step
    FROM windows
    WHERE least_ratio > ratio_threshold AND row_count = window_rows
    GROUP BY run
),
entropies AS (
    SELECT run, step, avg(entropy) AS entropy
    FROM attention_by_step()
    WHERE isfinite(entropy)
    GROUP BY run, step
),
collapses AS (
    SELECT entropies.run, min(entropies.step) AS harm_step, 'attention entropy falls to '
        || format('{:.3g} from {:.3g}', min(entropies.entropy), any_value(first.entropy)) AS harm
    FROM entropies
    JOIN entropies AS first ON first.run = entropies.run AND first.step = 0
    JOIN large ON large.run = entropies.run AND entropies.step >= large.step
    WHERE entropies.entropy < entropy_threshold AND entropies.entropy < entropy_share * first.entropy
    GROUP BY entropies.run
),
slopes AS (
    SELECT
        steps.run, steps.step,
        median(train_loss) OVER (PARTITION BY steps.run ORDER BY steps.step
            ROWS BETWEEN slope_rows - 1 PRECEDING AND CURRENT ROW) AS later_loss,
        median(train_loss) OVER (PARTITION BY steps.run ORDER BY steps.step
            ROWS BETWEEN 2 * slope_rows - 1 PRECEDING AND slope_rows PRECEDING) AS earlier_loss,
        count(*) OVER (PARTITION BY steps.run ORDER BY steps.step) AS row_count
    FROM steps
    JOIN large ON large.run = steps.run AND steps.step >= large.step AND steps.step <= large.end_step
    WHERE rank = 0 AND isfinite(train_loss)
),
stalls AS (
    SELECT run, min(step) AS harm_step, format(
        'the loss rises from {:.3g} to {:.3g} nats/token in {} steps', arg_min(earlier_loss, step),
        arg_min(later_loss, step), any_value(slope_rows)
    ) AS harm
    FROM slopes
    WHERE row_count >= 2 * slope_rows AND later_loss >= earlier_loss
    GROUP BY run
),
jumps AS (
    SELECT run, step FROM loss_spikes() UNION ALL SELECT run, step FROM gradient_norm_spikes()
),
spikes AS (
    SELECT jumps.run, min(jumps.step) AS harm_step, format('{} spikes of loss or gradient norm', count(*)) AS harm
    FROM jumps
    JOIN large ON large.run = jumps.run AND jumps.step >= large.step
    GROUP BY jumps.run
    HAVING count(*) >= any_value(spike_threshold)
),
harms AS (
    SELECT run, string_agg(harm, '; ') AS harm FROM (
        FROM collapses UNION ALL FROM stalls UNION ALL FROM spikes
    ) GROUP BY run
)
SELECT
    large.run, -- run directory
    large.step AS first_step, -- optimizer updates
    end_step AS last_step, -- optimizer updates
    'update ratio' AS subject, -- quantity
    ratio AS observed, -- 1, largest median over matrices
    CAST(ratio_threshold AS DOUBLE) AS threshold, -- 1
    format('updates of {:.3g} of the weights at step {}; ', ratio, ratio_step) || harm AS detail -- text
FROM large
JOIN harms USING (run)
ORDER BY large.run;
