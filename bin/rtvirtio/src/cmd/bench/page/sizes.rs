//! How large the paper's network has to be: its Fig. 3.

use rtvirtio_bench::sizes::Size;
use rtvirtio_report::svg::{Axis, Series, Spread, XyPlot};
use rtvirtio_report::{BenchSection, Plot};

/// Fig. 3; none of no sizes.
pub fn sizes(device: &str, sizes: &[Size]) -> Option<BenchSection> {
    let n = sizes.first()?.n;
    let mut layers: Vec<usize> = sizes.iter().map(|s| s.layers).collect();
    layers.dedup();
    let series = |(index, layers): (usize, &usize)| Series {
        name: format!("{layers} hidden"),
        index,
        dashed: false,
        points: sizes
            .iter()
            .filter(|s| s.layers == *layers)
            .map(|s| (s.neurons as f64, s.loss, format!("{} neurons: {:.4} s^2", s.neurons, s.loss)))
            .collect(),
    };
    let axis = |label: &str, format| Axis {
        label: label.to_owned(),
        spread: Spread::Linear,
        ends: None,
        marks: None,
        format,
    };
    let plot = XyPlot {
        title: "loss over model size".to_owned(),
        heading: String::new(),
        x: axis("neurons in each hidden layer", |v| format!("{v:.0}")),
        y: axis("mean squared error, s^2", |v| format!("{v:.2}")),
        series: layers.iter().enumerate().map(series).collect(),
        limit: None,
        legend: true,
        height: 240.0,
    };
    Some(BenchSection {
        title: format!("{device}: how large the paper's network has to be (its Fig. 3)"),
        text: vec![
            "The paper finds that the loss stays the same beyond 5 neurons in a layer, and takes 3 layers (2 hidden ones and the output) of 15.".to_owned(),
        ],
        plots: vec![(
            format!("loss on {n} tasks of the paper's kind of runs, of folds that were not learned from"),
            Plot::Xy(Box::new(plot)),
        )],
        tables: Vec::new(),
    })
}
