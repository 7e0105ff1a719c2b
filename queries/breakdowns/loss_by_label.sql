-- Loss and accuracy of each value of a label at one evaluation: regular against irregular, or any other label.
-- Source: example_losses, token-weighted: the sums over the values equal the split's total.
CREATE OR REPLACE MACRO loss_by_label(
    label_name := NULL, -- label column of examples; NULL: the manifest's group label
    split_name := NULL, -- data split; NULL: the manifest's primary split, every split where it names none
    at_step := NULL -- optimizer updates; the last evaluation up to it; NULL: the last one
) AS TABLE
WITH candidate_losses AS (
    SELECT
        losses.run, losses.step, losses.split, losses.example_id, losses.loss_sum, losses.token_count,
        losses.answer_loss_sum, losses.answer_token_count, losses.correct,
        coalesce(label_name, runs.group_label) AS label,
        max(losses.step) OVER (PARTITION BY losses.run, losses.split) AS last_step
    FROM example_losses AS losses
    JOIN runs ON runs.run = losses.run AND losses.split = coalesce(split_name, runs.primary_split, losses.split)
    WHERE losses.rank = 0 AND (at_step IS NULL OR losses.step <= at_step)
)
SELECT
    candidate_losses.run, -- run directory
    step, -- optimizer updates
    split, -- data split
    candidate_losses.label, -- label column
    value, -- value of the label
    sum(loss_sum) FILTER (WHERE isfinite(loss_sum))
        / nullif(sum(token_count) FILTER (WHERE isfinite(loss_sum)), 0) AS loss, -- nats/token, finite examples
    sum(answer_loss_sum) FILTER (WHERE isfinite(answer_loss_sum))
        / nullif(sum(answer_token_count) FILTER (WHERE isfinite(answer_loss_sum)), 0) AS answer_loss, -- nats/token
    avg(CAST(correct AS INTEGER)) AS accuracy, -- 0..1, share of examples with every answer token right
    CAST(sum(token_count) AS BIGINT) AS token_count, -- tokens
    count(*) AS example_count, -- examples
    count(*) FILTER (WHERE NOT isfinite(loss_sum)) AS nonfinite_count -- examples whose loss is not finite
FROM candidate_losses
JOIN example_labels USING (run, example_id, label)
WHERE step = last_step
GROUP BY candidate_losses.run, step, split, candidate_losses.label, value
ORDER BY candidate_losses.run, split, value;
