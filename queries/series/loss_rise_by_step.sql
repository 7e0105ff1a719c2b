-- How far the loss of a split lies above its lowest evaluation so far, with the certain part of the rise.
-- Source: per-example differences to the evaluation at the minimum so far, so that the examples' own difficulty
-- cancels; delete-one-cluster jackknife (Efron & Stein 1981), lower end of the 95% t interval.
CREATE OR REPLACE MACRO loss_rise_by_step(
    split_name := NULL, -- data split; NULL: the manifest's primary split
    cluster_name := NULL -- label column that is the sampling unit; NULL: the manifest's, else each example
) AS TABLE
WITH paired_losses AS (
    SELECT
        losses.run, losses.step, losses.split, losses.example_id, losses.loss_sum, losses.token_count,
        coalesce(cluster.value, CAST(losses.example_id AS VARCHAR)) AS cluster
    FROM example_losses AS losses
    JOIN runs ON runs.run = losses.run AND losses.split = coalesce(split_name, runs.primary_split)
    LEFT JOIN example_labels AS cluster ON cluster.run = losses.run
        AND cluster.example_id = losses.example_id
        AND cluster.label = coalesce(cluster_name, runs.cluster_label)
    WHERE losses.rank = 0 AND isfinite(losses.loss_sum) AND losses.token_count > 0
),
evaluation_losses AS (
    SELECT run, step, split, sum(loss_sum) / sum(token_count) AS loss
    FROM paired_losses
    GROUP BY run, step, split
),
minima AS (
    SELECT
        run, step, split, loss,
        arg_min(step, loss) OVER so_far AS minimum_step,
        min(loss) OVER so_far AS minimum_loss
    FROM evaluation_losses
    WINDOW so_far AS (PARTITION BY run, split ORDER BY step)
),
cluster_rises AS (
    SELECT
        minima.run, minima.split, minima.step, later.cluster,
        sum(later.loss_sum - earlier.loss_sum * later.token_count / earlier.token_count) AS rise,
        sum(later.token_count) AS token_count
    FROM minima
    JOIN paired_losses AS later USING (run, split, step)
    JOIN paired_losses AS earlier ON earlier.run = minima.run
        AND earlier.split = minima.split
        AND earlier.step = minima.minimum_step
        AND earlier.example_id = later.example_id
    WHERE minima.minimum_step < minima.step
    GROUP BY minima.run, minima.split, minima.step, later.cluster
),
deletions AS (
    SELECT
        run, split, step, rise, token_count,
        (sum(rise) OVER whole - rise)
            / nullif(sum(token_count) OVER whole - token_count, 0) AS rise_without_cluster
    FROM cluster_rises
    WINDOW whole AS (PARTITION BY run, split, step)
),
rises AS (
    SELECT
        run, split, step,
        sum(rise) / sum(token_count) AS rise,
        count(*) - 1 AS degrees_of_freedom,
        sqrt((count(*) - 1) * var_pop(rise_without_cluster)) AS standard_error
    FROM deletions
    GROUP BY run, split, step
)
SELECT
    minima.run, -- run directory
    minima.split, -- data split
    minima.step, -- optimizer updates
    loss, -- nats/token over finite examples
    minimum_step, -- optimizer updates, evaluation with the lowest loss so far
    minimum_loss, -- nats/token
    rise, -- nats/token above the minimum, same examples; null at a minimum
    rise - quantile * standard_error AS lower -- nats/token; null with one cluster
FROM minima
LEFT JOIN rises USING (run, split, step)
LEFT JOIN t_quantiles ON t_quantiles.degrees_of_freedom = least(rises.degrees_of_freedom, 31)
ORDER BY minima.run, minima.split, minima.step;
