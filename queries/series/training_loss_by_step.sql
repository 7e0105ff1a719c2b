-- Training loss of each optimizer step, and its perplexity.
-- Source: steps.train_loss, the mean over the counted tokens of the step's own batch; rank 0.
CREATE OR REPLACE MACRO training_loss_by_step() AS TABLE
SELECT
    run, -- run directory
    step, -- optimizer updates
    train_loss, -- nats/token, non-finite values included
    exp(train_loss) AS perplexity -- 1
FROM steps
WHERE rank = 0 AND train_loss IS NOT NULL
ORDER BY run, step;
