-- Does held-out loss rise, beyond its uncertainty, while training loss keeps falling?
-- Source: overfit_onset on the primary split; a minimum that was undercut later is no finding.
CREATE OR REPLACE MACRO overfitting(
    least_rise := 0.02 -- nats/token above the minimum
) AS TABLE
SELECT
    run, -- run directory
    minimum_step AS first_step, -- optimizer updates
    confirmed_step AS last_step, -- optimizer updates
    split AS subject, -- data split
    confirmed_loss - minimum_loss AS observed, -- nats/token
    CAST(least_rise AS DOUBLE) AS threshold, -- nats/token
    format(
        'lowest {:.3g} nats/token at step {}, {:.3g} at step {}; at least {:.2g} of the rise is certain; '
        || 'provisional: longer training may lower it again',
        minimum_loss, minimum_step, confirmed_loss, confirmed_step, lower_bound
    ) AS detail -- text
FROM overfit_onset(rise_threshold := least_rise)
WHERE NOT is_superseded
ORDER BY run, minimum_step;
