-- How long each value of a label takes to reach a loss: regular verbs before irregular ones.
-- Source: label_loss_by_step; first evaluation at or below, so the answer is as coarse as the evaluations.
CREATE OR REPLACE MACRO steps_to_loss(
    loss_threshold := 0.5, -- nats/token
    label_name := NULL, -- label column of examples; NULL: the manifest's group label
    split_name := NULL -- data split; NULL: the manifest's primary split
) AS TABLE
SELECT
    run, -- run directory
    value, -- value of the label
    min(step) FILTER (WHERE loss <= loss_threshold AND nonfinite_count = 0) AS step -- optimizer updates; null: never
FROM label_loss_by_step(label_name := label_name, split_name := split_name)
GROUP BY run, value
ORDER BY run, value;
