-- Is the loss no lower than it was some steps before?
-- Source: Amazon SageMaker Developer Guide, "List of Debugger built-in rules", LossNotDecreasing: num_steps 10, any
-- decrease will do, losses of evaluation before those of training
-- (awsdocs/amazon-sagemaker-developer-guide, doc_source/debugger-built-in-rules.md at c6db92f).
-- The primary split's evaluations; training losses, one batch each, only where there is no evaluation.
CREATE OR REPLACE MACRO loss_not_decreasing(
    num_steps := 10 -- steps, least distance of the two losses
) AS TABLE
WITH RECURSIVE evaluation_losses AS (
    SELECT evaluations.run, step, split AS subject, loss_sum / nullif(token_count, 0) AS loss
    FROM evaluations
    JOIN runs ON runs.run = evaluations.run AND evaluations.split = runs.primary_split
    WHERE rank = 0 AND coalesce(repeat, 0) = 0
),
losses AS MATERIALIZED (
    SELECT run, step, subject, loss FROM evaluation_losses WHERE isfinite(loss)
    UNION ALL
    SELECT run, step, 'train_loss', train_loss
    FROM steps
    WHERE rank = 0 AND isfinite(train_loss) AND run NOT IN (SELECT run FROM evaluation_losses)
),
checks AS ( -- each check looks back at the one before, which is at least num_steps behind
    SELECT run, min(step) AS step, CAST(NULL AS BIGINT) AS previous_step FROM losses GROUP BY run
    UNION ALL
    SELECT checks.run, min(losses.step), checks.step
    FROM checks
    JOIN losses ON losses.run = checks.run AND losses.step >= checks.step + num_steps
    GROUP BY checks.run, checks.step
),
stalls AS (
    SELECT checks.run, checks.step, later.subject, later.loss, earlier.loss AS previous_loss, previous_step
    FROM checks
    JOIN losses AS later ON later.run = checks.run AND later.step = checks.step
    JOIN losses AS earlier ON earlier.run = checks.run AND earlier.step = previous_step
    WHERE later.loss >= earlier.loss
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    any_value(subject) AS subject, -- data split, or train_loss
    arg_min(loss - previous_loss, step) AS observed, -- nats/token, rise
    CAST(0 AS DOUBLE) AS threshold, -- nats/token
    format(
        '{:.4g} nats/token at step {}, {:.4g} at step {}; {} such checks',
        arg_min(previous_loss, step), arg_min(previous_step, step), arg_min(loss, step), min(step), count(*)
    ) AS detail -- text
FROM stalls
GROUP BY run
ORDER BY run;
