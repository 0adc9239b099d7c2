// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/xspin/xspin/bpf"
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

	Protocol hpu.Protocol // acknowledges. Defaults to SLMP for the predefined formats of it, else nobody does

	Binder hpu.Binder               // says where messages go. Defaults to:
	Window spin.Window              // all of them to the begin of this window
	Events chan<- spin.MessageEvent // and their ends to this channel

	State        int    // bytes of state memory of each message
	InitialState []byte // what that begins with; the rest is 0

	Timeout    time.Duration  // after which an incomplete message ends, since its last news. Defaults to 10 s
	Incomplete mpq.Incomplete // how it ends. Defaults to mpq.Abandon
	Linger     time.Duration  // with mpq.Linger: how long to wait after EOM. Defaults to 10 ms
	Remember   time.Duration  // for how long late duplicates of a message are known. Defaults to 4 s
	Held       int            // packets that may wait for their message's header packet. Defaults to a quarter of the credits, 64 at most; negative: none
	Memory     int            // bytes for what of messages came behind a hole, all together. Defaults to 16 MiB
	Checksums  hpu.Checksums  // what is done about UDP checksums. Defaults to hpu.VerifyComplete

	// Resources are what handlers use beside packets. Its Host, if there is one,
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

	// With BlockedRR: a message is cut in sequences of so many bytes, which
	// are dealt out to so many virtual HPUs, each on one HPU at a time.
	Sequence uint32
	VHPUs    int
}

// A Policy tells how packets are spread over HPUs.
type Policy = loader.Policy

// Scheduling policies (D4.7 section 4.4.4).
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

// complete checks a spec and fills in what was left out.
func (s *ContextSpec) complete(hpus int) error {
	if s.Name == "" {
		return errors.New("no name")
	}
	if strings.ContainsFunc(s.Name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return errors.New("the name has characters that cannot be printed")
	}
	if s.Policy != ByMessage && s.Policy != ByPacket && s.Policy != BlockedRR {
		return fmt.Errorf("scheduling policy %d: there are ByMessage, ByPacket and BlockedRR", s.Policy)
	}
	s.Rulesets = slices.Clone(s.Rulesets)
	if last := s.First + len(s.Rulesets) - 1; s.First < 0 || s.First > 0 && last >= matcher.MaxRulesets {
		return fmt.Errorf("ruleset numbers %d..%d: possible are 0..%d", s.First, last, matcher.MaxRulesets-1)
	}
	if s.Numbers != nil {
		if s.First != 0 {
			return fmt.Errorf("ruleset number %d is given by First, and there are Numbers: only one of them may be", s.First)
		}
		if err := checkNumbers(s.Numbers, len(s.Rulesets)); err != nil {
			return err
		}
		s.Numbers = slices.Clone(s.Numbers)
	}
	if s.HostActivated {
		if err := s.hostActivated(); err != nil {
			return err
		}
	} else if len(s.Rulesets) == 0 {
		return errors.New("no ruleset: no packet would ever come")
	}
	if n := len(s.Rulesets); n > matcher.MaxRulesets {
		return fmt.Errorf("%w: %d rulesets, possible are %d", ErrTable, n, matcher.MaxRulesets)
	}
	for i := range s.Rulesets {
		if err := s.Rulesets[i].Validate(); err != nil {
			return err
		}
	}
	if s.Format == nil {
		name := s.Rulesets[0].Format
		for _, r := range s.Rulesets {
			if r.Format != name {
				return fmt.Errorf("rulesets %s and %s have different message formats, %q and %q: name one", s.Rulesets[0].Name, r.Name, name, r.Format)
			}
		}
		if name == "" {
			name = "packet"
		}
		if s.Format = matcher.FormatByName(name); s.Format == nil {
			return fmt.Errorf("message format %q: there are %v", name, matcher.FormatNames())
		}
	}
	if err := s.Format.Validate(); err != nil {
		return err
	}
	if len(s.Format.Key) == 0 {
		s.Policy = ByPacket // every packet is a message
	}
	if s.Policy == BlockedRR && (s.Sequence < 1 || s.VHPUs < 1 || s.VHPUs > loader.MaxVHPUs || s.Format.Offset == nil) {
		return fmt.Errorf("blocked-rr with sequences of %d bytes on %d virtual HPUs in format %s: at least 1 byte, 1..%d virtual HPUs and a format with an offset are needed", s.Sequence, s.VHPUs, s.Format.Name, loader.MaxVHPUs)
	}
	if !s.Format.Ends() {
		switch {
		case s.Handlers.Payload == nil:
			return errors.New("no payload handler")
		case len(s.Format.Key) > 0 && (s.Handlers.Header != nil || s.Handlers.Completion != nil):
			return fmt.Errorf("messages of format %s never end: there can be no header and no completion handler", s.Format.Name)
		case s.Binder != nil || s.Window != nil || s.Events != nil || s.State != 0:
			return fmt.Errorf("format %s has no messages of several packets: no binder, window, events or state", s.Format.Name)
		}
	}
	all := uint64(math.MaxUint64) >> (64 - hpus)
	if s.CoreMask == 0 {
		s.CoreMask = all
	}
	if s.CoreMask&all == 0 {
		return fmt.Errorf("core mask %#x names no HPU: there are 0..%d", s.CoreMask, hpus-1)
	}
	if extra := s.CoreMask &^ all; extra != 0 {
		return fmt.Errorf("core mask %#x names HPUs that are not there (%#x): there are 0..%d", s.CoreMask, extra, hpus-1)
	}
	if s.Messages == 0 {
		s.Messages = DefaultMessages
	}
	if s.Messages < 1 || s.Messages > bpf.MaxBuckets {
		return fmt.Errorf("%d messages: possible are 1..%d", s.Messages, bpf.MaxBuckets)
	}
	if s.Credits < 0 {
		return fmt.Errorf("%d credits", s.Credits)
	}
	if s.Overload != OverloadDrops && s.Overload != OverloadSpills {
		return fmt.Errorf("overload policy %d: there are OverloadDrops and OverloadSpills", int(s.Overload))
	}
	if s.Share == 0 {
		s.Share = 1
	}
	if s.Share < 1 || s.Share > MaxShare {
		return fmt.Errorf("share %d: possible are 1..%d", s.Share, MaxShare)
	}
	return nil
}

// checkNumbers checks numbers for so many rulesets.
func checkNumbers(numbers []int, rulesets int) error {
	if len(numbers) != rulesets {
		return fmt.Errorf("%d numbers for %d rulesets", len(numbers), rulesets)
	}
	for i, s := range numbers {
		if s < 0 || s >= matcher.MaxRulesets {
			return fmt.Errorf("ruleset number %d: possible are 0..%d", s, matcher.MaxRulesets-1)
		}
		if slices.Contains(numbers[:i], s) {
			return fmt.Errorf("ruleset number %d is there twice", s)
		}
	}
	return nil
}

// hostActivated checks what such contexts cannot have, and completes them.
func (s *ContextSpec) hostActivated() error {
	switch {
	case len(s.Rulesets) > 0 || s.First > 0:
		return errors.New("it is host-activated: there can be no rulesets, the host brings its messages")
	case s.Format != nil || s.Protocol != nil:
		return errors.New("it is host-activated: its messages are no packets, and have neither another message format nor a protocol")
	case s.Credits > 0 || s.Overload != OverloadDrops || s.Policy == BlockedRR:
		return errors.New("it is host-activated: there are no packets to have credits, overload or blocked-rr")
	}
	s.Format = hostFormat()
	s.Held = -1
	s.Checksums = hpu.VerifyNone
	return nil
}
