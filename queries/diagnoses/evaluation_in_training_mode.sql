-- Do two evaluations of the same weights on the same split give different losses?
-- Source: an evaluation is a function of weights and data; dropout makes it a draw. Equal weights by their hash. A draw
-- may come out the same by chance, so that the sum over the answers is compared as well, where it is logged.
CREATE OR REPLACE MACRO evaluation_in_training_mode(
    -- One machine repeats bit for bit; sums of 10^4 float32 in another order differ by up to 10^4 2^-24 = 6e-4 in
    -- the worst case and 6e-6 in the root mean square. Dropout of 0.1 moves a loss by 1e-2.
    relative_tolerance := 1e-5 -- 1, of the loss
) AS TABLE
WITH repeats AS (
    SELECT
        run, split, weights_hash, token_count, answer_token_count,
        min(step) AS step, max(step) AS later_step, count(*) AS evaluation_count,
        min(loss_sum) / token_count AS lowest_loss,
        max(loss_sum) / token_count AS highest_loss,
        (max(loss_sum) - min(loss_sum)) / abs(max(loss_sum)) AS loss_difference,
        (max(answer_loss_sum) - min(answer_loss_sum)) / abs(max(answer_loss_sum)) AS answer_difference,
        bool_or(evaluation_mode IS FALSE) AS says_so
    FROM evaluations
    WHERE rank = 0 AND weights_hash IS NOT NULL AND isfinite(loss_sum) AND token_count > 0
    GROUP BY run, split, weights_hash, token_count, answer_token_count -- with other counts, other examples
    HAVING count(*) > 1
),
differences AS (
    SELECT
        *,
        greatest(
            CASE WHEN isfinite(loss_difference) THEN loss_difference ELSE 0 END,
            CASE WHEN isfinite(answer_difference) THEN answer_difference ELSE 0 END
        ) AS difference
    FROM repeats
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(later_step) AS last_step, -- optimizer updates
    split AS subject, -- data split
    max(difference) AS observed, -- 1, largest relative difference, of all tokens or of the answers
    any_value(CAST(relative_tolerance AS DOUBLE)) AS threshold, -- 1
    format(
        'the weights of step {} have losses from {:.6g} to {:.6g} nats/token in {} evaluations; so have {} others',
        min(step), arg_min(lowest_loss, step), arg_min(highest_loss, step), arg_min(evaluation_count, step),
        count(*) - 1
    ) || CASE WHEN bool_or(says_so) THEN '; they are logged as made in training mode' ELSE '' END AS detail -- text
FROM differences
WHERE difference > relative_tolerance
GROUP BY run, split
ORDER BY run, split;
