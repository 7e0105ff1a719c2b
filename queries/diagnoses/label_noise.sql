-- Does the hardest twentieth of the training examples stay hard while the others are learned?
-- Source: wrong labels follow no rule, so they are learned last and by heart (Zhang et al. 2017; Arpit et al. 2017).
-- Both groups are followed over the last third of the run so far, so that slow training moves neither. Consistent with
-- examples that are rare or ambiguous, too: look at them.
CREATE OR REPLACE MACRO label_noise(
    pace_threshold := 0.33, -- 1, ln of the fall of the 95% quantile / ln of the median's; 0.4 to 0.8 without noise
    tail_threshold := 0.75, -- 1, fall of the 95% quantile of the answer losses: a tail that is learned is no noise
    median_threshold := 0.8, -- 1, fall of the median: the others are learned
    loss_threshold := 0.4, -- nats/token, the 95% quantile itself: an easy tail is none either
    learned_threshold := 0.15, -- nats/token, the median itself: a model too small to learn has hard examples, too
    met_threshold := 3, -- evaluations of the last five
    least_step := 500, -- optimizer updates; before, rules are learned rather than examples
    train_split := 'train' -- name of the split that is trained on
) AS TABLE
WITH losses AS (
    SELECT run, step, example_id, answer_loss_sum / answer_token_count AS answer_loss
    FROM example_losses
    WHERE rank = 0 AND split = train_split AND answer_token_count > 0 AND isfinite(answer_loss_sum)
),
quantiles AS (
    SELECT
        run, step,
        median(answer_loss) AS middle,
        quantile_cont(answer_loss, 0.95) AS tail,
        count(*) AS example_count
    FROM losses
    GROUP BY run, step
),
changes AS (
    SELECT
        later.run, later.step, later.tail, later.middle, later.example_count,
        max(earlier.step) AS earlier_step,
        later.tail / arg_max(earlier.tail, earlier.step) AS tail_ratio,
        later.middle / arg_max(earlier.middle, earlier.step) AS middle_ratio
    FROM quantiles AS later
    JOIN quantiles AS earlier ON earlier.run = later.run AND earlier.step <= later.step * 2 / 3
    WHERE later.step >= least_step
    GROUP BY later.run, later.step, later.tail, later.middle, later.example_count
),
judged AS (
    SELECT
        run, step, tail, middle, example_count, earlier_step, tail_ratio, middle_ratio,
        ln(tail_ratio) / ln(middle_ratio) AS pace,
        count(*) FILTER (
            WHERE middle < learned_threshold AND middle_ratio < median_threshold
                AND tail_ratio > tail_threshold AND tail > loss_threshold
                AND ln(tail_ratio) / ln(middle_ratio) < pace_threshold
        ) OVER (PARTITION BY run ORDER BY step ROWS BETWEEN 4 PRECEDING AND CURRENT ROW) AS met_count
    FROM changes
),
confirmed AS (
    SELECT run, min(earlier_step) AS first_step, max(step) AS step
    FROM judged
    WHERE met_count >= met_threshold
    GROUP BY run
),
hardest AS (
    SELECT
        confirmed.run,
        list(format('{} ({:.2f})', example_id, answer_loss) ORDER BY answer_loss DESC)[1:5] AS examples
    FROM confirmed
    JOIN losses ON losses.run = confirmed.run AND losses.step = confirmed.step
    GROUP BY confirmed.run
)
SELECT
    confirmed.run, -- run directory
    first_step, -- optimizer updates
    confirmed.step AS last_step, -- optimizer updates
    train_split AS subject, -- data split
    pace AS observed, -- 1, at the last such evaluation
    CAST(pace_threshold AS DOUBLE) AS threshold, -- 1
    format(
        '95% quantile {:.3g} nats/token, {:.2f} of what it was at step {}, where the median {:.3g} is {:.2f}; '
        || 'hardest of {} examples: ', tail, tail_ratio, earlier_step, middle, middle_ratio, example_count
    ) || array_to_string(examples, ', ') AS detail -- text
FROM confirmed
JOIN judged ON judged.run = confirmed.run AND judged.step = confirmed.step
JOIN hardest ON hardest.run = confirmed.run
ORDER BY confirmed.run;
