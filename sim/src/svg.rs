//! Recall against queries per second, as an SVG picture.

use plotters::prelude::{
    BindKeyPoints, ChartBuilder, Circle, Color, EmptyElement, IntoDrawingArea, IntoFont, IntoLogRange,
    LineSeries, PathElement, RGBColor, SVGBackend, SeriesLabelPosition, Text, WHITE,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{BLACK, TextStyle};

use crate::report::Point;

/// Size of the picture in pixels.
const SIZE: (u32, u32) = (900, 600);
/// Colours of the series, told apart also by those who do not see red and green.
const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(213, 94, 0), RGBColor(0, 158, 115), RGBColor(204, 121, 167)];

/// One line of the picture.
#[derive(Debug, Clone, Copy)]
pub struct Series<'a> {
    /// Its line in the legend.
    pub label: &'a str,
    /// Points, in the order in which they are joined.
    pub points: &'a [Point],
}

/// Draws recall (x) against queries per second (y, logarithmic). `title` stands above, `note` (machine, commit) below.
///
/// # Errors
/// If there is nothing to draw, in words.
pub fn recall_over_qps(title: &str, note: &str, k: u32, series: &[Series<'_>]) -> Result<String, String> {
    let all = || series.iter().flat_map(|series| series.points).filter(|point| point.qps > 0.0);
    if all().next().is_none() {
        return Err("no point to draw".into());
    }
    let mut svg = String::new();
    draw(&mut svg, title, note, k, series, &x_range(all()), &y_range(all()))
        .map_err(|error| error.to_string())?;
    Ok(svg)
}

/// Recalls of all points, a little wider, within 0 to 1.
fn x_range<'a>(points: impl Iterator<Item = &'a Point>) -> std::ops::Range<f64> {
    let (low, high) = bounds(points.map(|point| point.recall_at_k));
    let margin = ((high - low) * 0.12).max(0.005);
    (low - margin).max(0.0)..(high + margin).min(1.0 + margin / 4.0)
}

/// Speeds of all points, wider by a factor, so that a logarithmic axis has marks to show.
fn y_range<'a>(points: impl Iterator<Item = &'a Point>) -> std::ops::Range<f64> {
    let (low, high) = bounds(points.map(|point| point.qps));
    low / 1.6..high * 1.6
}

/// Round speeds inside the range: 1, 2 and 5 of every decade, or more where that leaves few.
fn y_marks(y: &std::ops::Range<f64>) -> Vec<f64> {
    let marks = |steps: &[f64]| -> Vec<f64> {
        let decades = y.start.log10().floor() as i32..=y.end.log10().ceil() as i32;
        decades
            .flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)))
            .filter(|mark| y.contains(mark))
            .collect()
    };
    let coarse = marks(&[1.0, 2.0, 5.0]);
    if coarse.len() >= 4 { coarse } else { marks(&[1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) }
}

fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
}

/// Breaks a title at a blank near the middle where it is too long for one line.
fn lines(title: &str) -> Vec<&str> {
    const LINE_MAX: usize = 100;
    let middle = title.len() / 2;
    let blank = |at: &usize| title.as_bytes()[*at] == b' ';
    let near = (0..title.len()).filter(blank).min_by_key(|at| at.abs_diff(middle));
    match near {
        Some(at) if title.len() > LINE_MAX => vec![&title[..at], &title[at + 1..]],
        _ => vec![title],
    }
}

fn draw(
    svg: &mut String,
    title: &str,
    note: &str,
    k: u32,
    series: &[Series<'_>],
    x: &std::ops::Range<f64>,
    y: &std::ops::Range<f64>,
) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let centred = Pos::new(HPos::Center, VPos::Top);
    let style = |size: u32| TextStyle::from(("sans-serif", size).into_font()).color(&BLACK).pos(centred);
    let middle = i32::try_from(SIZE.0 / 2).expect("a picture is small");
    for (at, line) in lines(title).into_iter().enumerate() {
        let down = 12 + 20 * i32::try_from(at).expect("a title has two lines");
        area.draw(&Text::new(line, (middle, down), style(15)))?;
    }
    let bottom = i32::try_from(SIZE.1).expect("a picture is small") - 22;
    area.draw(&Text::new(note, (middle, bottom), style(11)))?;

    let plot = area.margin(56, 30, 16, 24);
    let mut chart = ChartBuilder::on(&plot)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(x.clone(), y.clone().log_scale().with_key_points(y_marks(y)))?;
    chart
        .configure_mesh()
        .x_desc(format!("recall@{k}"))
        .y_desc("queries per second (log scale)")
        .axis_desc_style(("sans-serif", 15))
        .label_style(("sans-serif", 13))
        .x_labels(9)
        .x_label_formatter(&|recall| format!("{recall:.3}"))
        .y_label_formatter(&|qps| format!("{qps:.0}"))
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(225, 225, 225))
        .draw()?;
    for (at, one) in series.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        let line = one.points.iter().map(|point| (point.recall_at_k, point.qps));
        chart
            .draw_series(LineSeries::new(line, colour.stroke_width(2)))?
            .label(one.label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(
            one.points.iter().map(|point| Circle::new((point.recall_at_k, point.qps), 4, colour.filled())),
        )?;
        let beside = TextStyle::from(("sans-serif", 12).into_font())
            .color(&colour)
            .pos(Pos::new(HPos::Left, VPos::Bottom));
        chart.draw_series(one.points.iter().map(|point| {
            let label = Text::new(format!("ef {}", point.ef), (7, -3), beside.clone());
            EmptyElement::at((point.recall_at_k, point.qps)) + label
        }))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .background_style(WHITE.filled())
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 13))
        .draw()?;
    area.present()?;
    drop(chart);
    drop(plot);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_names_its_axes_and_every_point() {
        let points = [(40, 0.85, 900.0), (80, 0.91, 520.0), (120, 0.945, 390.0), (160, 0.961, 300.0)]
            .map(|(ef, recall, qps)| Point { ef, recall_at_k: recall, qps, ..Point::default() });
        let series = [Series { label: "native graph", points: &points }];
        let svg = recall_over_qps(&"fifty thousand vectors ".repeat(6), "a machine, a commit", 10, &series)
            .unwrap();
        for text in ["recall@10", "queries per second", "native graph", "ef 40", "ef 160", "a machine"] {
            assert!(svg.contains(text), "{text} is missing");
        }
        assert!(recall_over_qps("", "", 10, &[]).is_err());
        if let Some(path) = std::env::var_os("SHINE_KEEP_SVG") {
            std::fs::write(path, svg).unwrap();
        }
    }
}
