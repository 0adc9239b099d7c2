// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"time"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

// DefaultMessages is how many messages of a context can be in flight, and how many
// messages or flows the program tells apart when it keeps them on their HPUs.
const DefaultMessages = 4096

// MaxShare is the largest weight of a context.
const MaxShare = 1000

// A ContextSpec describes an execution context.
type ContextSpec struct {
	Name string // in statistics, events and errors. Required

	// Rulesets that bring packets here: any of them. They are numbered when
	// the context is activated: as Numbers says, one for each; else First and up
	// if that is not 0; else the lowest free numbers. The lowest that matches a
	// packet wins, so without Numbers and First that depends on the order in which
	// contexts were activated. See also NIC.Renumber.
	Rulesets []matcher.Ruleset
	First    int
	Numbers  []int

	Format   *matcher.Format // of messages. Defaults to that of the rulesets, or to `packet`
	Handlers hpu.Handlers

	// Kernel, if there is one, has the handlers, in eBPF, instead of Handlers. What they have
	// no use for is refused, see KernelRefuses; but if the object hands messages over
	// (XSPIN_HAND_OVER), Handlers have those, and what is said here is about them, too.
	Kernel *Kernel

	Hook Hook // where handlers in eBPF are called. Defaults to HookAuto

	Policy   Policy // Defaults to ByMessage, which for `packet` is ByPacket
	CoreMask uint64 // bit h: HPU h may be used. 0 for all

	// Credits limit how many buffers of the context are in flight on a receive
	// queue. 0 for an equal share of what the other contexts leave. A frame that
	// spans more buffers than that is refused always. What others still have in
	// flight is missing at first, and given when it comes back. While contexts
	// compete for HPUs they have less, see Share.
	Credits int

	// Place is a context that was cleared, see NIC.Clear, or nil. The new context
	// gets the credit that is reserved for it.
	Place *Context

	Timestamp bool // have packets carry their time of arrival

	// Messages is how many messages can be in flight; beyond, new ones are
	// refused, unacknowledged. Defaults to DefaultMessages. The following are
	// for formats whose messages end, such as `slmp`.
	Messages int

	Protocol hpu.Protocol // acknowledges. Defaults to SLMP for its predefined formats, else nothing is acknowledged

	Binder hpu.Binder               // says where messages go. Defaults to:
	Window spin.Window              // all of them to the start of this window
	Events chan<- spin.MessageEvent // and their ends to this channel; for handlers in eBPF it needs a buffer

	State        int    // bytes of state memory of each message, kept for the next one in its slot
	InitialState []byte // what that begins with; the rest is 0

	Timeout    time.Duration  // after which an incomplete message ends, since its last news. Defaults to 10 s
	Incomplete mpq.Incomplete // how it ends. Defaults to mpq.Abandon
	Linger     time.Duration  // with mpq.Linger: how long to wait after EOM. Defaults to 10 ms
	Remember   time.Duration  // for how long late duplicates of a message are known, since the last one. Defaults to spin.DefaultRemember; for less see slmp.MaxSilence
	Held       int            // packets that may wait for their message's header packet. Defaults to a quarter of the credits, 64 at most; negative: none
	Memory     int            // for tracking out-of-order data of all messages, in bytes. Defaults to 16 MiB
	Checksums  hpu.Checksums  // what is done about UDP checksums. Defaults to hpu.VerifyComplete

	// Resources are what handlers use in addition to packets. Its Host, if there is one,
	// gets the events of all messages whose binding names nobody else, with its
	// User if that is a uint64; its lanes must be NIC.Workers. A Resolver is there
	// without being named.
	Resources hpu.Resources

	Overload Overload // what happens to packets for which the context has no credit. Defaults to OverloadDrops

	// Share is the weight of the context, 1..MaxShare, when there is not enough
	// HPU time for all: those that bring more than can be done get handler time by
	// weight, over some 100 ms, whatever a packet costs them. Defaults to 1.
	Share int

	// HostActivated contexts have no rulesets, and a message format of their own:
	// see NIC.Trigger.
	HostActivated bool

	// With BlockedRR: a message is cut into sequences of Sequence bytes, which
	// are dealt out to VHPUs virtual HPUs, each on one HPU at a time.
	Sequence uint32
	VHPUs    int
}

// Tier names where the context's handlers run: "user" for HPUs, or "kernel".
func (s *ContextSpec) Tier() string {
	if s.Kernel != nil {
		return "kernel"
	}
	return "user"
}

// credited tells whether the context's packets take credit: not those that no buffer of
// a ring holds.
func (s *ContextSpec) credited() bool { return !s.HostActivated && s.onHPUs() }

// onHPUs tells whether HPUs have packets of the context: of one in the kernel, those of
// messages that its handlers there hand over.
func (s *ContextSpec) onHPUs() bool { return s.Kernel == nil || s.handsOver() }

func (s *ContextSpec) handsOver() bool {
	return s.Kernel != nil && s.Kernel.Object != nil && s.Kernel.Object.HandsOver()
}

// A Policy tells how packets are spread over HPUs.
type Policy = loader.Policy

// Scheduling policies (FPsPIN report, section 4.4.4).
const (
	ByMessage = loader.ByMessage // packets of a message stay on one HPU
	ByPacket  = loader.ByPacket  // packets go wherever there is room
	BlockedRR = loader.BlockedRR // sequences of a message stay on one (SC 2019, section 3.2.1)
)

// Overload says what happens to packets for which a context has no credit left.
type Overload int

// What happens to them.
const (
	OverloadDrops  Overload = iota // dropped, in the XDP program, and counted
	OverloadSpills                 // to the Linux stack, as if they had matched nothing, and counted
)
