-- Did the gradient norm jump far above its own level and stay there, with nothing to bound the update?
-- Source: clipping bounds the step whatever the gradient (Pascanu et al. 2013), so the norm after clipping counts.
-- Levels are medians of ten steps, which one batch cannot move, against the highest such level before.
CREATE OR REPLACE MACRO exploding_gradients(
    level_ratio := 2, -- 1, level of the clipped norm / the median of the levels before
    level_rows := 10, -- steps of a level
    past_rows := 64, -- steps of the past that is compared with, before the level
    least_past_rows := 20 -- steps; the first steps have no past
) AS TABLE
WITH norms AS (
    SELECT run, step, gradient_norm, clipped_gradient_norm
    FROM steps
    WHERE rank = 0 AND isfinite(gradient_norm) AND isfinite(clipped_gradient_norm)
),
levels AS (
    SELECT
        run, step,
        median(clipped_gradient_norm) OVER recent AS level,
        median(clipped_gradient_norm) OVER past AS past_level,
        max(gradient_norm) OVER recent AS highest,
        max(clipped_gradient_norm) OVER before AS highest_before,
        count(*) OVER recent AS row_count,
        count(*) OVER past AS past_count
    FROM norms
    WINDOW
        recent AS (PARTITION BY run ORDER BY step ROWS BETWEEN level_rows - 1 PRECEDING AND CURRENT ROW),
        past AS (PARTITION BY run ORDER BY step
            ROWS BETWEEN past_rows + level_rows - 1 PRECEDING AND level_rows PRECEDING),
        before AS (PARTITION BY run ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND level_rows PRECEDING)
)
SELECT
    run, -- run directory
    min(step) - any_value(level_rows // 2 - 1) AS first_step, -- optimizer updates, half of the level is above from here
    max(step) AS last_step, -- optimizer updates
    'clipped_gradient_norm' AS subject, -- quantity
    max(level / past_level) AS observed, -- 1, largest ratio of levels
    any_value(CAST(level_ratio AS DOUBLE)) AS threshold, -- 1
    format(
        'level {:.3g} over {} steps where it was {:.3g} before; up to {:.3g} before clipping',
        arg_max(level, level / past_level), any_value(level_rows), arg_max(past_level, level / past_level), max(highest)
    ) AS detail -- text
FROM levels
WHERE row_count = level_rows
    AND past_count >= least_past_rows
    AND level > level_ratio * past_level
    AND level > highest_before -- a norm that clipping has let pass before is bounded
GROUP BY run
ORDER BY run;
