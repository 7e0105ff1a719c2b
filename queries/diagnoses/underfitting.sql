-- Has the training loss stopped falling far above what the data allow, at a learning rate that could still move it?
-- Source: the loss that no function of the prefix can undercut, against the loss on the training split. Losses fall
-- like a power of the steps (Hestness et al. 2017), so that flat means flat over a share of the run so far, whatever
-- its unit.
CREATE OR REPLACE MACRO underfitting(
    excess_threshold := 0.2, -- nats/token above the entropy floor
    fall_threshold := 0.1, -- 1, share of the excess that the last third of the run so far must take off
    rate_share := 0.3, -- 1, of the largest learning rate: a cosine tail is flat by itself
    train_split := 'train', -- name of the split that is trained on
    least_step := 200 -- optimizer updates; a plateau at the token frequencies comes before
) AS TABLE
WITH excesses AS (
    SELECT evaluated.run, step, evaluated.loss, evaluated.loss - floors.loss AS excess, floors.loss AS floor
    FROM evaluation_loss_by_step() AS evaluated
    JOIN reference_losses AS floors ON floors.run = evaluated.run
        AND floors.reference = 'entropy_floor'
        AND floors.split = evaluated.split
    WHERE evaluated.split = train_split AND isfinite(evaluated.loss)
),
rates AS (
    SELECT run, step, learning_rate, max(learning_rate) OVER (PARTITION BY run) AS peak
    FROM steps
    WHERE rank = 0 AND isfinite(learning_rate)
),
falls AS (
    SELECT
        later.run, later.step, later.loss, later.excess, later.floor,
        max(earlier.step) AS earlier_step,
        1 - later.excess / arg_max(earlier.excess, earlier.step) AS fall
    FROM excesses AS later
    JOIN excesses AS earlier ON earlier.run = later.run AND earlier.step <= later.step * 2 / 3
    JOIN rates ON rates.run = later.run AND rates.step = later.step AND learning_rate >= rate_share * peak
    WHERE later.step >= least_step
    GROUP BY later.run, later.step, later.loss, later.excess, later.floor
)
SELECT
    run, -- run directory
    min(earlier_step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    any_value(train_split) AS subject, -- data split
    arg_max(excess, step) AS observed, -- nats/token above the floor, last such evaluation
    any_value(CAST(excess_threshold AS DOUBLE)) AS threshold, -- nats/token
    format(
        '{:.3g} nats/token at step {} where {:.3g} can be reached; {:.2g}% of the excess gone since step {}',
        arg_max(loss, step), max(step), any_value(floor), 100 * arg_max(fall, step), arg_max(earlier_step, step)
    ) AS detail -- text
FROM falls
WHERE excess > excess_threshold AND fall < fall_threshold
GROUP BY run
ORDER BY run;
