-- Is an evaluation loss lower than any causal model can reach on that split?
-- Source: the prefix-tree entropy of the enumerated split, -(1/N) sum c(p,x) ln(c(p,x)/c(p)), is the least loss of a
-- function of the prefix. Below it the model sees the future, the targets leaked, or the loss is miscounted.
CREATE OR REPLACE MACRO loss_below_entropy_floor(
    -- float32 log-softmax errs by up to |logit| 2^-23 per token, 1.2e-4 at a logit of 1000: eightfold that. Real
    -- violations are tenths of a nat.
    absolute_tolerance := 0.001, -- nats/token
    relative_tolerance := 0.00001 -- 1; a floor that was summed in float32 over 10^4 tokens
) AS TABLE
WITH violations AS (
    SELECT
        evaluations.run, split, step,
        loss_sum / token_count AS evaluated_loss,
        loss - absolute_tolerance - relative_tolerance * loss AS least_loss,
        loss AS floor
    FROM evaluations
    JOIN reference_losses USING (run, split)
    WHERE reference = 'entropy_floor'
        AND isfinite(loss_sum)
        AND token_count > 0
        AND evaluation_mode IS DISTINCT FROM false -- dropout is not a function of the prefix
        AND loss_sum / token_count < loss - absolute_tolerance - relative_tolerance * loss
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    split AS subject, -- data split
    min(evaluated_loss) AS observed, -- nats/token, lowest
    CAST(any_value(least_loss) AS DOUBLE) AS threshold, -- nats/token, the floor less the tolerance
    format(
        'lowest at step {}, {:.3g} nats/token below the floor {:.4g}; {} evaluations are below it',
        arg_min(step, evaluated_loss), any_value(floor) - min(evaluated_loss), any_value(floor), count(*)
    ) AS detail -- text
FROM violations
GROUP BY run, split
ORDER BY run, split;
