//! Size that the paper's network needs: its Fig. 3.

use super::sizes::Size;
use crate::page::Section;
use rtvirtio_report::svg::{Axis, Series, Spread};

use crate::page::xy::{axis, plot};

/// Fig. 3; `None` without sizes.
pub fn sizes(device: &str, sizes: &[Size]) -> Option<Section> {
    let n = sizes.first()?.n;
    let series = |(index, of): (usize, &[Size])| Series {
        name: format!("{} hidden", of[0].layers),
        index,
        dashed: false,
        points: of
            .iter()
            .map(|s| (s.neurons as f64, s.loss, format!("{} neurons: {:.4} s^2", s.neurons, s.loss)))
            .collect(),
    };
    let by_layers = sizes.chunk_by(|a, b| a.layers == b.layers);
    let y = Axis { format: |v| format!("{v:.2}"), ..axis("mean squared error, s^2", Spread::Linear) };
    let x = axis("neurons in each hidden layer", Spread::Linear);
    let plot = plot("loss over model size", x, y, by_layers.enumerate().map(series).collect(), None);
    Some(Section {
        title: format!("{device}: how large the paper's network has to be (its Fig. 3)"),
        text: vec![
            "The paper finds that the loss stays the same beyond 5 neurons in a layer, and takes 3 layers (2 hidden ones and the output) of 15.".to_owned(),
        ],
        plots: vec![(
            format!("loss on {n} tasks of the paper's kind of runs, of folds that were not learned from"),
            plot,
        )],
        tables: Vec::new(),
    })
}
