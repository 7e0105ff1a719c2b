-- Do the weights start so large that the first loss or the first activations leave the useful range?
-- Source: the loss of uniform guessing is ln V; logits of variance s2 add s2 / 2 to it, so that 1.5 ln V needs a
-- standard deviation of 2 and more. Xavier, LeCun and He initialisation have a gain of at most sqrt 2.
CREATE OR REPLACE MACRO initialisation_too_large(
    loss_ratio_threshold := 1.5, -- 1, first loss / ln V; 1.00 to 1.25 in healthy runs, 6.5 at tenfold weights
    gain_threshold := 2 -- 1, median over matrices; 1.0 in the reference model, 3.0 at threefold weights
) AS TABLE
WITH first_losses AS (
    SELECT steps.run, train_loss, train_loss / nullif(uniform_loss, 0) AS loss_ratio, uniform_loss
    FROM steps
    JOIN runs ON runs.run = steps.run
    WHERE rank = 0 AND step = 0 AND isfinite(train_loss)
),
gains AS (
    SELECT run, median(gain) AS gain, max(gain) AS largest_gain, arg_max(name, gain) AS name
    FROM weight_gain_by_step()
    WHERE step = 0
    GROUP BY run
),
heads AS (
    SELECT
        run,
        avg(entropy) FILTER (WHERE isfinite(entropy)) AS entropy,
        max(max_abs_logit) FILTER (WHERE isfinite(max_abs_logit)) AS largest_logit
    FROM attention_by_step()
    WHERE step = 0
    GROUP BY run
),
evidence AS (
    SELECT
        run, 'train_loss' AS quantity, loss_ratio AS amount, CAST(loss_ratio_threshold AS DOUBLE) AS bound,
        format('first loss {:.4g} nats/token is {:.3g} ln V', train_loss, loss_ratio) AS words
    FROM first_losses
    UNION ALL
    SELECT
        run, 'weight matrices', gain, CAST(gain_threshold AS DOUBLE),
        format('median gain {:.3g} of the weight matrices, largest {:.3g} of {}', gain, largest_gain, name)
    FROM gains
)
SELECT
    evidence.run, -- run directory
    0 AS first_step, -- optimizer updates
    0 AS last_step, -- optimizer updates
    quantity AS subject, -- train_loss or weight matrices
    amount AS observed, -- 1, ratio to ln V, or gain
    bound AS threshold, -- 1
    words || coalesce(
        format('; attention entropy {:.3g}, largest logit {:.3g}', heads.entropy, heads.largest_logit), ''
    ) AS detail -- text
FROM evidence
LEFT JOIN heads ON heads.run = evidence.run
WHERE amount > bound
ORDER BY evidence.run, quantity;
