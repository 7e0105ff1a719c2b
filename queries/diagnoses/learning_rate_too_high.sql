-- Are the updates large against the weights, and does the run show that it suffers from it?
-- Source: large_updates. They alone are no fault: small weights and short runs have them too. So one of four harms must
-- be there: attention has collapsed, the loss does not fall, it does not come back to where it was before the updates
-- were large, or the gradient norm spikes again and again.
CREATE OR REPLACE MACRO learning_rate_too_high(
    ratio_threshold := 0.01, -- 1, median over matrices of |update| / |weight|; 0.007 at the reference peak
    entropy_threshold := 0.3, -- 0..1, mean over heads; 0.65 or more in healthy runs
    entropy_share := 0.5, -- 1, of the run's own first entropy
    slope_rows := 40, -- steps of each of the two windows whose median losses are compared
    spike_threshold := 3 -- spikes of loss or gradient norm
) AS TABLE
WITH large AS (
    FROM large_updates(ratio_threshold := ratio_threshold)
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
    JOIN large ON large.run = entropies.run AND entropies.step >= large.first_step
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
    JOIN large ON large.run = steps.run AND steps.step BETWEEN large.first_step AND large.last_step
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
levels AS (
    SELECT run, median(train_loss) AS loss
    FROM (
        SELECT steps.run, train_loss
        FROM steps
        JOIN large ON large.run = steps.run AND steps.step < large.first_step
        WHERE rank = 0 AND isfinite(train_loss)
        QUALIFY row_number() OVER (PARTITION BY steps.run ORDER BY steps.step DESC) <= slope_rows
    )
    GROUP BY run
    HAVING count(*) = slope_rows
),
losses_kept AS (
    SELECT slopes.run, min(step) AS harm_step, format(
        'the loss, {:.3g} nats/token before, is {:.3g} after {} steps', any_value(levels.loss),
        arg_min(later_loss, step), any_value(slope_rows)
    ) AS harm
    FROM slopes
    JOIN levels USING (run)
    WHERE row_count = slope_rows AND later_loss >= levels.loss
    GROUP BY slopes.run
),
jumps AS (
    SELECT run, step FROM loss_spikes() UNION ALL SELECT run, step FROM gradient_norm_spikes()
),
spikes AS (
    SELECT jumps.run, min(jumps.step) AS harm_step, format('{} spikes of loss or gradient norm', count(*)) AS harm
    FROM jumps
    JOIN large ON large.run = jumps.run AND jumps.step >= large.first_step
    GROUP BY jumps.run
    HAVING count(*) >= any_value(spike_threshold)
),
harms AS (
    SELECT run, string_agg(harm, '; ') AS harm FROM (
        FROM collapses UNION ALL FROM stalls UNION ALL FROM losses_kept UNION ALL FROM spikes
    ) GROUP BY run
)
SELECT
    large.run, -- run directory
    first_step, -- optimizer updates
    last_step, -- optimizer updates
    'update ratio' AS subject, -- quantity
    ratio AS observed, -- 1, largest median over matrices
    CAST(ratio_threshold AS DOUBLE) AS threshold, -- 1
    format('updates of {:.3g} of the weights at step {}; ', ratio, ratio_step) || harm AS detail -- text
FROM large
JOIN harms USING (run)
ORDER BY large.run;
