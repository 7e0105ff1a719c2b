-- Held-out loss of each value of a label over training, with its uncertainty over clusters of examples.
-- Source: token-weighted loss of example_losses; delete-one-cluster jackknife and Student's t (Efron & Stein 1981;
-- few clusters make a bootstrap undercover). Tokens of one cluster are not independent: clusters are the sample.
CREATE OR REPLACE MACRO label_loss_by_step(
    label_name := NULL, -- label column of examples; NULL: the manifest's group label
    cluster_name := NULL, -- label column that is the sampling unit; NULL: the manifest's, else each example
    split_name := NULL -- data split; NULL: the manifest's primary split
) AS TABLE
WITH labelled_losses AS (
    SELECT
        losses.run, losses.step, label.value, losses.loss_sum, losses.token_count,
        coalesce(cluster.value, CAST(losses.example_id AS VARCHAR)) AS cluster
    FROM example_losses AS losses
    JOIN runs ON runs.run = losses.run AND losses.split = coalesce(split_name, runs.primary_split)
    JOIN example_labels AS label ON label.run = losses.run
        AND label.example_id = losses.example_id
        AND label.label = coalesce(label_name, runs.group_label)
    LEFT JOIN example_labels AS cluster ON cluster.run = losses.run
        AND cluster.example_id = losses.example_id
        AND cluster.label = coalesce(cluster_name, runs.cluster_label)
    WHERE losses.rank = 0
),
clusters AS (
    SELECT
        run, step, value, cluster,
        coalesce(sum(loss_sum) FILTER (WHERE isfinite(loss_sum)), 0) AS loss_sum,
        coalesce(sum(token_count) FILTER (WHERE isfinite(loss_sum)), 0) AS token_count,
        count(*) FILTER (WHERE NOT isfinite(loss_sum)) AS nonfinite_count
    FROM labelled_losses
    GROUP BY run, step, value, cluster
),
deletions AS (
    SELECT
        run, step, value, loss_sum, token_count, nonfinite_count,
        (sum(loss_sum) OVER whole - loss_sum)
            / nullif(sum(token_count) OVER whole - token_count, 0) AS loss_without_cluster
    FROM clusters
    WINDOW whole AS (PARTITION BY run, step, value)
),
estimates AS (
    SELECT
        run, step, value,
        sum(loss_sum) / nullif(sum(token_count), 0) AS loss,
        count(*) AS cluster_count,
        CAST(sum(token_count) AS BIGINT) AS token_count,
        CAST(sum(nonfinite_count) AS BIGINT) AS nonfinite_count,
        sqrt((count(*) - 1) * var_pop(loss_without_cluster)) AS standard_error
    FROM deletions
    GROUP BY run, step, value
)
SELECT
    run, -- run directory
    step, -- optimizer updates
    value, -- value of the label
    loss, -- nats/token over finite examples
    loss - quantile * standard_error AS lower, -- nats/token, 95% interval; null with one cluster
    loss + quantile * standard_error AS upper, -- nats/token
    cluster_count, -- clusters
    token_count, -- tokens
    nonfinite_count -- examples left out because their loss is not finite
FROM estimates
LEFT JOIN t_quantiles ON degrees_of_freedom = least(cluster_count - 1, 31)
ORDER BY run, step, value;
