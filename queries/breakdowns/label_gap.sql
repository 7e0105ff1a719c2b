-- How much worse one value of a label does than another, with its uncertainty over clusters of examples.
-- Source: difference of token-weighted losses; delete-one-cluster jackknife (Efron & Stein 1981), clusters of both
-- values pooled, t quantile for the clusters of the smaller value less one, which errs to the wide side.
CREATE OR REPLACE MACRO label_gap(
    label_name := NULL, -- label column of examples; NULL: the manifest's group label
    cluster_name := NULL, -- label column that is the sampling unit; NULL: the manifest's, else each example
    split_name := NULL, -- data split; NULL: the manifest's primary split
    at_step := NULL -- optimizer updates; the last evaluation up to it; NULL: the last one
) AS TABLE
WITH candidate_losses AS (
    SELECT
        losses.run, losses.step, label.value, losses.loss_sum, losses.token_count,
        coalesce(cluster.value, CAST(losses.example_id AS VARCHAR)) AS cluster,
        max(losses.step) OVER (PARTITION BY losses.run) AS last_step
    FROM example_losses AS losses
    JOIN runs ON runs.run = losses.run AND losses.split = coalesce(split_name, runs.primary_split)
    JOIN example_labels AS label ON label.run = losses.run
        AND label.example_id = losses.example_id
        AND label.label = coalesce(label_name, runs.group_label)
    LEFT JOIN example_labels AS cluster ON cluster.run = losses.run
        AND cluster.example_id = losses.example_id
        AND cluster.label = coalesce(cluster_name, runs.cluster_label)
    WHERE losses.rank = 0 AND isfinite(losses.loss_sum) AND (at_step IS NULL OR losses.step <= at_step)
),
clusters AS (
    SELECT run, step, value, cluster, sum(loss_sum) AS loss_sum, sum(token_count) AS token_count
    FROM candidate_losses
    WHERE step = last_step
    GROUP BY run, step, value, cluster
),
totals AS (
    SELECT
        run, step, value,
        sum(loss_sum) AS loss_sum, sum(token_count) AS token_count, count(*) AS cluster_count
    FROM clusters
    GROUP BY run, step, value
),
pairs AS (
    SELECT
        one.run, one.step, one.value, other.value AS other_value,
        one.loss_sum AS loss_sum, one.token_count AS token_count,
        other.loss_sum AS other_loss_sum, other.token_count AS other_token_count,
        least(one.cluster_count, other.cluster_count) - 1 AS smaller_freedom
    FROM totals AS one
    JOIN totals AS other ON other.run = one.run AND other.value > one.value
),
pair_clusters AS (
    SELECT DISTINCT pairs.run, pairs.value, pairs.other_value, clusters.cluster
    FROM pairs
    JOIN clusters ON clusters.run = pairs.run AND clusters.value IN (pairs.value, pairs.other_value)
),
deletions AS (
    SELECT
        run, value, other_value,
        (pairs.loss_sum - coalesce(one.loss_sum, 0)) / nullif(pairs.token_count - coalesce(one.token_count, 0), 0)
            - (other_loss_sum - coalesce(other.loss_sum, 0))
                / nullif(other_token_count - coalesce(other.token_count, 0), 0) AS gap_without_cluster
    FROM pair_clusters
    JOIN pairs USING (run, value, other_value)
    LEFT JOIN clusters AS one USING (run, value, cluster)
    LEFT JOIN clusters AS other ON other.run = pair_clusters.run
        AND other.value = pair_clusters.other_value
        AND other.cluster = pair_clusters.cluster
),
errors AS (
    SELECT run, value, other_value, sqrt((count(*) - 1) * var_pop(gap_without_cluster)) AS standard_error
    FROM deletions
    GROUP BY run, value, other_value
)
SELECT
    run, -- run directory
    step, -- optimizer updates
    value, -- value of the label
    other_value, -- the value that it is compared with
    loss_sum / token_count - other_loss_sum / other_token_count AS gap, -- nats/token, loss of value less other's
    gap - quantile * standard_error AS lower, -- nats/token, 95% interval; null where a value has one cluster
    gap + quantile * standard_error AS upper -- nats/token
FROM pairs
JOIN errors USING (run, value, other_value)
LEFT JOIN t_quantiles ON degrees_of_freedom = least(smaller_freedom, 31)
ORDER BY run, value, other_value;
