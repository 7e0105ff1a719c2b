-- Loss of each evaluated split, in evaluation mode, on the whole split.
-- Source: evaluations, first evaluation of each step (repeat 0), rank 0.
CREATE OR REPLACE MACRO evaluation_loss_by_step() AS TABLE
SELECT
    run, -- run directory
    step, -- optimizer updates
    split, -- data split
    loss_sum / nullif(token_count, 0) AS loss, -- nats/token over all counted tokens
    answer_loss_sum / nullif(answer_token_count, 0) AS answer_loss, -- nats/token over the answer's tokens
    token_count -- tokens
FROM evaluations
WHERE rank = 0 AND coalesce(repeat, 0) = 0 AND loss_sum IS NOT NULL
ORDER BY run, step, split;
