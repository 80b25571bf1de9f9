//! Gets one call answered: which node to ask, when to move on, when to give up. Knows time, but no socket.
//!
//! Three ways to ask. [`Courier::ask`] is for calls that may run twice: a node that fell silent keeps its call while
//! the next node gets it too, and the first answer wins. [`Courier::ask_in_turn`] is for long work that may run twice
//! but should not: one node after the other. [`Courier::tell`] is for calls that must run once: the next node is asked
//! only if the one before surely did nothing.
//!
//! Invariant: every call ends by its deadline, with an answer or with the error that says most about why not.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use shine_common::wire::{CnRequest, CnResponse, Fault, FaultCode};
use tokio::time::{Instant, sleep_until};

use crate::ClientError;
use crate::peers::{Peer, Peers};

/// First pause after every node was asked in vain; doubled up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// Longest such pause.
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// Why one node gave no answer to one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallError {
    /// It answered with a fault.
    Fault(Fault),
    /// The call never reached it.
    NotSent(String),
    /// Its certificate, or ours, was not accepted.
    Refused(String),
    /// The connection ended before an answer came: the call may have been carried out.
    Lost(String),
    /// The deadline passed before an answer came: the call may have been carried out.
    Late,
}

impl CallError {
    /// Whether it may have been carried out although it failed.
    pub(crate) fn is_ambiguous(&self) -> bool {
        match self {
            Self::Lost(_) | Self::Late => true,
            Self::Fault(fault) => {
                matches!(
                    fault.code,
                    FaultCode::DeadlineExceeded | FaultCode::MemoryNodeLost | FaultCode::Internal
                )
            }
            Self::NotSent(_) | Self::Refused(_) => false,
        }
    }

    /// Whether another node may do better.
    pub(crate) fn moves_on(&self) -> bool {
        match self {
            Self::Fault(fault) => {
                matches!(fault.code, FaultCode::Overloaded | FaultCode::Unavailable | FaultCode::StaleEpoch)
            }
            Self::NotSent(_) | Self::Refused(_) | Self::Lost(_) | Self::Late => true,
        }
    }

    /// Whether the same node may do better a moment later.
    fn may_pass(&self) -> bool {
        !matches!(self, Self::Refused(_)) && self.moves_on()
    }

    /// How much it says about why the whole call failed.
    fn weight(&self) -> u8 {
        match self {
            Self::Fault(_) => 4,
            Self::Refused(_) => 3,
            Self::Late => 2,
            Self::Lost(_) => 1,
            Self::NotSent(_) => 0,
        }
    }

    /// The error for the user.
    pub(crate) fn at(self, node: &Peer) -> ClientError {
        let node = node.to_string();
        match self {
            Self::Fault(fault) => ClientError::Fault { node, fault },
            Self::Refused(cause) => ClientError::Refused { node, cause },
            Self::NotSent(cause) | Self::Lost(cause) => ClientError::Unreachable { node, cause },
            Self::Late => ClientError::Unreachable { node, cause: "no answer in time".into() },
        }
    }
}

/// Carries one call to one compute node.
pub(crate) trait Transport: Send + Sync {
    /// Calls `peer`; ends by `deadline` with an answer or an error.
    fn call(
        &self,
        peer: &Arc<Peer>,
        request: &CnRequest,
        deadline: Instant,
    ) -> impl Future<Output = Result<CnResponse, CallError>> + Send;
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Courier<T> {
    pub(crate) transport: T,
    pub(crate) peers: Peers,
    /// Longest silence of a node before another one is asked too.
    pub(crate) patience: Duration,
    /// What peers' times count from.
    origin: Instant,
}

/// The node that answered, and its answer.
pub(crate) type Answered = (Arc<Peer>, CnResponse);

impl<T: Transport> Courier<T> {
    pub(crate) fn new(transport: T, peers: Peers, patience: Duration) -> Self {
        Self { transport, peers, patience, origin: Instant::now() }
    }

    /// Calls one node and keeps its health.
    pub(crate) async fn call(
        &self,
        peer: &Arc<Peer>,
        request: &CnRequest,
        deadline: Instant,
    ) -> Result<CnResponse, CallError> {
        let outcome = self.transport.call(peer, request, deadline).await;
        match &outcome {
            Ok(_) | Err(CallError::Fault(_)) => peer.answered(self.mark()),
            Err(_) => peer.failed(self.mark()),
        }
        outcome
    }

    async fn fly(
        &self,
        peer: Arc<Peer>,
        request: &(impl Fn(Duration) -> CnRequest + Sync),
        deadline: Instant,
    ) -> (Arc<Peer>, Result<CnResponse, CallError>) {
        let request = request(deadline.saturating_duration_since(Instant::now()));
        let outcome = self.call(&peer, &request, deadline).await;
        (peer, outcome)
    }

    /// Gets a call answered that may run more than once. `request` makes it for the time that is left.
    ///
    /// # Errors
    /// The first fault that another node would repeat; else, at the deadline, the error that says most.
    pub(crate) async fn ask(
        &self,
        request: impl Fn(Duration) -> CnRequest + Sync,
        deadline: Instant,
    ) -> Result<Answered, ClientError> {
        let mut round = self.round(deadline);
        let mut flights = FuturesUnordered::new();
        // The node asked last, since when, and until when its silence is borne.
        let mut newest: Option<(Arc<Peer>, u64)> = None;
        let mut bear_until = deadline;
        let give_up = sleep_until(deadline);
        tokio::pin!(give_up);
        loop {
            if flights.is_empty() {
                let Some(peer) = self.next_peer(&mut round).await else {
                    return Err(round.error());
                };
                newest = Some((Arc::clone(&peer), self.mark()));
                bear_until = Instant::now() + self.patience;
                flights.push(self.fly(peer, &request, deadline));
            }
            tokio::select! {
                biased;
                Some((peer, outcome)) = flights.next() => match outcome {
                    Ok(answer) => return Ok((peer, answer)),
                    Err(error) if !error.moves_on() => return Err(error.at(&peer)),
                    Err(error) => round.failed(peer, error),
                },
                () = &mut give_up => return Err(round.error()),
                () = sleep_until(bear_until), if !round.left.is_empty() => {
                    let silent = newest.as_ref().is_some_and(|(peer, since)| self.is_silent(peer, *since));
                    if silent && let Some(peer) = round.take() {
                        newest = Some((Arc::clone(&peer), self.mark()));
                        flights.push(self.fly(peer, &request, deadline));
                    } else if let Some((_, since)) = &mut newest {
                        // It answers others: this call is only slow.
                        *since = self.mark();
                    }
                    bear_until = Instant::now() + self.patience;
                }
            }
        }
    }

    /// Gets a call answered that may run twice but is dear: the next node is asked when the one before has failed, not
    /// when it is merely slow.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub(crate) async fn ask_in_turn(
        &self,
        request: &CnRequest,
        deadline: Instant,
    ) -> Result<Answered, ClientError> {
        let mut round = self.round(deadline);
        while let Some(peer) = self.next_peer(&mut round).await {
            match self.call(&peer, request, deadline).await {
                Ok(answer) => return Ok((peer, answer)),
                Err(error) if !error.moves_on() => return Err(error.at(&peer)),
                Err(error) => round.failed(peer, error),
            }
        }
        Err(round.error())
    }

    /// Gets a call carried out that must not run twice.
    ///
    /// # Errors
    /// As [`Self::ask`], or [`ClientError::OutcomeUnknown`] naming `what` if it may have been carried out.
    pub(crate) async fn tell(
        &self,
        request: &CnRequest,
        deadline: Instant,
        what: impl FnOnce() -> String,
    ) -> Result<Answered, ClientError> {
        let mut round = self.round(deadline);
        while let Some(peer) = self.next_peer(&mut round).await {
            match self.call(&peer, request, deadline).await {
                Ok(answer) => return Ok((peer, answer)),
                Err(error) if error.is_ambiguous() => {
                    return Err(ClientError::OutcomeUnknown {
                        what: what(),
                        cause: Box::new(error.at(&peer)),
                    });
                }
                Err(error) if !error.moves_on() => return Err(error.at(&peer)),
                Err(error) => round.failed(peer, error),
            }
        }
        Err(round.error())
    }

    /// A fresh round of all nodes.
    pub(crate) fn round(&self, deadline: Instant) -> Round {
        let left = VecDeque::from(self.peers.order(self.mark()));
        Round {
            // With no node at all, the map may bring one.
            may_pass: left.is_empty(),
            left,
            asked: Vec::new(),
            worst: None,
            pause: PAUSE_MIN,
            begun: Instant::now(),
            deadline,
        }
    }

    /// The next node to ask. Begins again, after a pause, when all were asked and one of them may do better later;
    /// `None` if that is not so, or the time is over.
    pub(crate) async fn next_peer(&self, round: &mut Round) -> Option<Arc<Peer>> {
        loop {
            if Instant::now() >= round.deadline {
                return None;
            }
            if let Some(peer) = round.take() {
                return Some(peer);
            }
            if !round.may_pass {
                return None;
            }
            sleep_until((Instant::now() + round.pause).min(round.deadline)).await;
            round.pause = (round.pause * 2).min(PAUSE_MAX);
            round.left = self.peers.order(self.mark()).into();
            round.may_pass = round.left.is_empty();
        }
    }

    /// Marks a node that did not answer in time, unless it answered somebody since `asked_ms`.
    pub(crate) fn is_silent(&self, peer: &Peer, asked_ms: u64) -> bool {
        let silent = peer.silent_since(asked_ms);
        if silent {
            peer.failed(self.mark());
        }
        silent
    }

    /// The present time on the peers' clock: milliseconds, from 1, since 0 means *never* there.
    pub(crate) fn mark(&self) -> u64 {
        self.origin.elapsed().as_millis() as u64 + 1
    }
}

/// One pass over the nodes, and what it has met so far.
#[derive(Debug)]
pub(crate) struct Round {
    left: VecDeque<Arc<Peer>>,
    asked: Vec<String>,
    worst: Option<(Arc<Peer>, CallError)>,
    may_pass: bool,
    pause: Duration,
    begun: Instant,
    deadline: Instant,
}

impl Round {
    /// The next node of this pass.
    pub(crate) fn take(&mut self) -> Option<Arc<Peer>> {
        let peer = self.left.pop_front()?;
        let node = peer.to_string();
        if !self.asked.contains(&node) {
            self.asked.push(node);
        }
        Some(peer)
    }

    /// Lets all nodes be asked again.
    pub(crate) fn try_again(&mut self) {
        self.may_pass = true;
    }

    /// Notes that a node of this pass failed.
    pub(crate) fn failed(&mut self, peer: Arc<Peer>, error: CallError) {
        self.may_pass |= error.may_pass();
        if self.worst.as_ref().is_none_or(|(_, worst)| worst.weight() <= error.weight()) {
            self.worst = Some((peer, error));
        }
    }

    /// Why the whole call failed.
    pub(crate) fn error(self) -> ClientError {
        match self.worst {
            Some((peer, error)) if error != CallError::Late => error.at(&peer),
            None if self.asked.is_empty() && self.left.is_empty() => ClientError::NoComputeNode,
            _ => ClientError::DeadlineExceeded {
                deadline: self.deadline.saturating_duration_since(self.begun),
                asked: self.asked.join(", "),
            },
        }
    }
}
