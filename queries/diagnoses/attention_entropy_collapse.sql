-- Do half of the attention heads look at one key each, with logits far beyond what the softmax needs?
-- Source: entropy collapse goes with logit growth (Zhai et al. 2023; Dehghani et al. 2023). One sharp head is a copy
-- head and no fault, so half of all heads must be sharp and their logits extreme.
CREATE OR REPLACE MACRO attention_entropy_collapse(
    entropy_threshold := 0.2, -- 0..1, of a head; 0.4 and more in healthy runs
    logit_threshold := 30, -- nats, median of the sharp heads' largest logits; 5 to 16 in healthy runs
    head_share := 0.5 -- 1, sharp heads / heads
) AS TABLE
WITH heads AS (
    SELECT run, step, layer, head, entropy, max_abs_logit, entropy < entropy_threshold AS is_sharp
    FROM attention_by_step()
    WHERE isfinite(entropy) AND isfinite(max_abs_logit)
),
recorded_steps AS (
    SELECT
        run, step,
        count(*) AS head_count,
        count(*) FILTER (WHERE is_sharp) AS sharp_count,
        median(max_abs_logit) FILTER (WHERE is_sharp) AS logit,
        avg(entropy) AS mean_entropy,
        min(entropy) AS least_entropy,
        arg_min(layer, entropy) AS layer,
        arg_min(head, entropy) AS head
    FROM heads
    GROUP BY run, step
),
first_entropies AS (
    SELECT run, arg_min(mean_entropy, step) AS first_entropy FROM recorded_steps GROUP BY run
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    format('layer {} head {}', arg_min(layer, step), arg_min(head, step)) AS subject, -- sharpest head
    arg_min(least_entropy, step) AS observed, -- 0..1, entropy of that head
    any_value(CAST(entropy_threshold AS DOUBLE)) AS threshold, -- 0..1
    format(
        '{} of {} heads below it at step {}, largest logits around {:.3g}; mean entropy {:.3g}, {:.3g} at the start',
        arg_min(sharp_count, step), arg_min(head_count, step), min(step), arg_min(logit, step),
        arg_min(mean_entropy, step), any_value(first_entropy)
    ) AS detail -- text
FROM recorded_steps
JOIN first_entropies USING (run)
WHERE sharp_count >= head_share * head_count AND logit > logit_threshold
GROUP BY run
ORDER BY run;
