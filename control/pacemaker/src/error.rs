//! What fails.

use std::path::PathBuf;

use rtvirtio_spec::SpecErrors;

/// Why the cluster could not be told, or a contract not be held.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PacemakerError {
    /// A tool of Pacemaker's is not there.
    #[error("cannot run {program}: is pacemaker-cli-utils installed?")]
    NoTool {
        /// The tool.
        program: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A tool of Pacemaker's refused.
    #[error("{command}: {message}; does the cluster run on this node (`crm_mon -1`)?")]
    Tool {
        /// The command line.
        command: String,
        /// What it said.
        message: String,
    },
    /// A tool of Pacemaker's does not end.
    #[error("{command} did not end within {waited} s: does the cluster answer (`crm_mon -1`)?")]
    Slow {
        /// The command line.
        command: String,
        /// For so long it was waited for.
        waited: u64,
    },
    /// A tool of Pacemaker's prints without end.
    #[error("{command} printed more than {most} bytes: is it Pacemaker's (`command -v`)?")]
    TooMuch {
        /// The command line.
        command: String,
        /// So many are read.
        most: u64,
    },
    /// What a tool printed is of another form.
    #[error("{command} printed what is not understood: {text}")]
    Output {
        /// The command line.
        command: String,
        /// The first line of it.
        text: String,
    },
    /// The cluster file.
    #[error("{}: {message} (docs/guide/fleet.md has the keys)", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// With line and column where there is one.
        message: String,
    },
    /// A spec.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
    /// A step on the host.
    #[error(transparent)]
    Step(#[from] rtvirtio_workflow::Error),
    /// The host cannot be read.
    #[error(transparent)]
    Host(#[from] rtvirtio_kernel::HostError),
    /// The journal.
    #[error(transparent)]
    Apply(#[from] rtvirtio_apply::ApplyError),
    /// A file of the state directory.
    #[error("{}", .path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Resources would have no node.
    #[error(
        "nothing is written, because utilization would then count, and no node says how much it has of what these take: {what}. Set autoset_utilization_cpu, \
         autoset_utilization_host_memory and autoset_utilization_hv_memory of each VirtualDomain to false and remove the utilization, or publish \
         what the nodes have by a clone of ocf:heartbeat:NodeUtilization"
    )]
    NoCapacity {
        /// Each, in words.
        what: String,
    },
    /// Another program holds settings of the VM.
    #[error("{resource}: {why}")]
    HeldElsewhere {
        /// The resource.
        resource: String,
        /// Which program, and the remedy.
        why: String,
    },
    /// The spec cannot be had on this node.
    #[error(transparent)]
    NoFile(rtvirtio_workflow::Error),
    /// A parameter, or the file that it names, is wrong on every node.
    #[error(transparent)]
    Configured(rtvirtio_workflow::Error),
    /// The contract is not as it was applied.
    #[error("{resource}: {what}")]
    NotVerified {
        /// The resource.
        resource: String,
        /// What differs.
        what: String,
    },
}
