-- Do the weights start so small that attention cannot tell one key from another?
-- Source: normalised entropy 1 is uniform attention. Scores are products of two projections, so that weights of a tenth
-- of their proper size give scores of a hundredth. Adam recovers from it: an anomaly without measured harm.
CREATE OR REPLACE MACRO initialisation_too_small(
    entropy_threshold := 0.99, -- 0..1, least of all heads; 0.84 in the reference model
    logit_threshold := 0.1 -- nats, largest of all heads; 5.6 in the reference model
) AS TABLE
WITH heads AS (
    SELECT
        run,
        min(entropy) AS least_entropy,
        max(max_abs_logit) AS largest_logit,
        count(*) AS head_count
    FROM attention_by_step()
    WHERE step = 0 AND isfinite(entropy) AND isfinite(max_abs_logit)
    GROUP BY run
),
gains AS (
    SELECT run, median(gain) AS gain FROM weight_gain_by_step() WHERE step = 0 GROUP BY run
)
SELECT
    heads.run, -- run directory
    0 AS first_step, -- optimizer updates
    0 AS last_step, -- optimizer updates
    'attention logits' AS subject, -- quantity
    largest_logit AS observed, -- nats, largest of all heads
    CAST(logit_threshold AS DOUBLE) AS threshold, -- nats
    format(
        'entropy of all {} heads at least {:.4g}, largest logit {:.3g}', head_count, least_entropy, largest_logit
    ) || coalesce(format('; median gain {:.3g} of the weight matrices', gain), '') AS detail -- text
FROM heads
LEFT JOIN gains ON gains.run = heads.run
WHERE least_entropy > entropy_threshold
    AND largest_logit < logit_threshold
    AND largest_logit > 0 -- exactly zero scores are zero_initialisation's
ORDER BY heads.run;
