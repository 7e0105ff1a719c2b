-- Are weights evaluated that the training has left behind?
-- Source: hashes of the weights. Only a hash of an earlier step, or one that stays while the live weights move, is
-- proof: an average of weights (EMA) has a hash of its own at every evaluation.
CREATE OR REPLACE MACRO stale_evaluation_weights(
    lag_threshold := 0 -- steps
) AS TABLE
WITH live AS (
    SELECT run, step, weights_hash FROM steps WHERE rank = 0 AND weights_hash IS NOT NULL
),
evaluated AS (
    SELECT run, step, any_value(weights_hash) AS weights_hash, min(split) AS split
    FROM evaluations
    WHERE rank = 0 AND coalesce(repeat, 0) = 0 AND weights_hash IS NOT NULL
    GROUP BY run, step
),
compared AS (
    SELECT
        evaluated.run, evaluated.step, split, evaluated.weights_hash,
        live.weights_hash AS live_hash,
        lag(evaluated.step) OVER evaluations_of_run AS previous_step,
        lag(evaluated.weights_hash) OVER evaluations_of_run AS previous_hash,
        lag(live.weights_hash) OVER evaluations_of_run AS previous_live_hash
    FROM evaluated
    JOIN live USING (run, step)
    WINDOW evaluations_of_run AS (PARTITION BY evaluated.run ORDER BY evaluated.step)
),
stale AS (
    SELECT
        compared.run, compared.step, split,
        coalesce(max(earlier.step), any_value(previous_step)) AS weights_step
    FROM compared
    LEFT JOIN live AS earlier ON earlier.run = compared.run
        AND earlier.weights_hash = compared.weights_hash
        AND earlier.step < compared.step
    WHERE compared.weights_hash <> live_hash
        AND (
            earlier.step IS NOT NULL
            OR (compared.weights_hash = previous_hash AND live_hash <> previous_live_hash)
        )
    GROUP BY compared.run, compared.step, split
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    'evaluated weights' AS subject, -- quantity
    CAST(max(step - weights_step) AS DOUBLE) AS observed, -- steps that they are behind
    any_value(CAST(lag_threshold AS DOUBLE)) AS threshold, -- steps
    format(
        'the evaluation of step {} is of the weights of step {}; {} evaluations are of older weights',
        min(step), arg_min(weights_step, step), count(*)
    ) AS detail -- text
FROM stale
WHERE step - weights_step > lag_threshold
GROUP BY run
ORDER BY run;
