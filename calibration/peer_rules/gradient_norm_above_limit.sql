-- Is a gradient norm above ten?
-- Source: a lone threshold of dashboards and alerts, on the global norm before clipping.
CREATE OR REPLACE MACRO gradient_norm_above_limit(
    norm_threshold := 10 -- objective/weight
) AS TABLE
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    'gradient_norm' AS subject, -- quantity
    max(gradient_norm) AS observed, -- objective/weight
    any_value(CAST(norm_threshold AS DOUBLE)) AS threshold, -- objective/weight
    format('{:.3g} at step {}; {} such steps', arg_min(gradient_norm, step), min(step), count(*)) AS detail -- text
FROM steps
WHERE rank = 0 AND NOT isnan(gradient_norm) AND gradient_norm > norm_threshold -- a NaN sorts above every number
GROUP BY run
ORDER BY run;
