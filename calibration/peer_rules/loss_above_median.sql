-- Is a training loss above twice its median?
-- Source: a lone threshold of dashboards and alerts. The median is over the steps of the run before this one, which is
-- what an alert knows; a median of fewer than ten is not trusted.
CREATE OR REPLACE MACRO loss_above_median(
    ratio_threshold := 2, -- 1, loss / median of the losses before
    least_past_rows := 10 -- steps
) AS TABLE
WITH losses AS (
    SELECT
        run, step, train_loss,
        median(train_loss) OVER past AS past_median,
        count(*) OVER past AS past_count
    FROM steps
    WHERE rank = 0 AND isfinite(train_loss)
    WINDOW past AS (PARTITION BY run ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    'train_loss' AS subject, -- quantity
    max(train_loss / past_median) AS observed, -- 1
    any_value(CAST(ratio_threshold AS DOUBLE)) AS threshold, -- 1
    format('{:.3g} nats/token at step {}', arg_min(train_loss, step), min(step)) AS detail -- text
FROM losses
WHERE past_count >= least_past_rows AND train_loss > ratio_threshold * past_median
GROUP BY run
ORDER BY run;
