-- How much worse the model does on held-out data than on training data, with the same weights.
-- Source: evaluations of both splits at the same step, so that dropout and batch noise are in neither.
CREATE OR REPLACE MACRO train_validation_gap(
    train_split := 'train', -- name of the split that was trained on
    validation_split := NULL -- name of the held-out split; NULL: the manifest's primary split
) AS TABLE
WITH losses AS (
    SELECT run, step, split, loss_sum / nullif(token_count, 0) AS loss
    FROM evaluations
    WHERE rank = 0 AND coalesce(repeat, 0) = 0
)
SELECT
    validation.run, -- run directory
    validation.step, -- optimizer updates
    train.loss AS train_loss, -- nats/token
    validation.loss AS validation_loss, -- nats/token
    validation.loss - train.loss AS gap -- nats/token
FROM losses AS validation
JOIN runs ON runs.run = validation.run
    AND validation.split = coalesce(validation_split, runs.primary_split)
JOIN losses AS train ON train.run = validation.run
    AND train.step = validation.step
    AND train.split = train_split
ORDER BY validation.run, validation.step;
