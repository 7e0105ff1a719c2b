-- Does every gradient contain the one before it?
-- Source: g_t = g_(t-1) + fresh has a projection cos(g_t, g_(t-1)) |g_t| on the old direction of |g_(t-1)| plus what
-- the fresh gradient adds. Without memory the projection is that of two noisy gradients, and smaller than either.
-- Healthy gradients agree in the first steps, and under a tiny learning rate for long, but do not contain each other,
-- nor do they grow.
CREATE OR REPLACE MACRO gradients_not_zeroed(
    cosine_threshold := 0.7, -- -1..1, median over the window; 0.2 in healthy runs
    projection_threshold := 0.97, -- 1, median of cos |g_t| / |g_(t-1)|
    growth_threshold := 5, -- 1, or: median norm of the window / the lowest norm so far
    window_rows := 25, -- steps
    least_step := 50 -- optimizer updates; healthy gradients agree before
) AS TABLE
WITH projections AS (
    SELECT
        run, step, gradient_norm, gradient_cosine_previous AS cosine,
        gradient_cosine_previous * gradient_norm
            / nullif(lag(gradient_norm) OVER (PARTITION BY run ORDER BY step), 0) AS projection
    FROM steps
    WHERE rank = 0 AND isfinite(gradient_norm)
),
windows AS (
    SELECT
        run, step, gradient_norm,
        median(cosine) OVER last_rows AS cosine,
        median(projection) OVER last_rows AS projection,
        median(gradient_norm) OVER last_rows AS level,
        min(gradient_norm) OVER (PARTITION BY run ORDER BY step) AS lowest_norm,
        count(*) OVER last_rows AS row_count,
        min(step) OVER last_rows AS window_step
    FROM projections
    WHERE isfinite(cosine) AND isfinite(projection)
    WINDOW last_rows AS (PARTITION BY run ORDER BY step ROWS BETWEEN window_rows - 1 PRECEDING AND CURRENT ROW)
),
grown AS (
    SELECT
        run, step, gradient_norm, cosine, projection, row_count, window_step,
        level / nullif(lowest_norm, 0) AS growth
    FROM windows
    WHERE row_count = window_rows
)
SELECT
    run, -- run directory
    min(window_step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    'gradient' AS subject, -- quantity
    arg_min(cosine, step) AS observed, -- -1..1, median cosine with the gradient before, first such window
    any_value(CAST(cosine_threshold AS DOUBLE)) AS threshold, -- -1..1
    format(
        'median cosine {:.2f} with the gradient before over {} steps, which it contains {:.3g} times; norm {:.3g}, '
        || 'level up to {:.3g} times the lowest', arg_min(cosine, step), any_value(window_rows),
        arg_min(projection, step), arg_min(gradient_norm, step), max(growth)
    ) AS detail -- text
FROM grown
WHERE window_step >= least_step
    AND cosine > cosine_threshold
    AND (projection > projection_threshold OR growth > growth_threshold)
GROUP BY run
ORDER BY run;
