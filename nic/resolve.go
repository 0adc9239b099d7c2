// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

// Resolve judges a description for a NIC with this number of HPUs (0: unknown), and returns
// it with defaults filled in. The error is spin.Problems: all that is wrong, by the keys
// that a configuration file has for it. Install resolves what it is given; a caller that has
// only read a description asks here, so that a rule is in one place and has one text.
func (s ContextSpec) Resolve(hpus int) (ContextSpec, error) {
	var wrong spin.Problems
	s.resolveName(&wrong)
	s.resolveRulesets(&wrong)
	s.resolveFormat(&wrong)
	s.resolveHook(&wrong)
	if s.Kernel != nil {
		s.resolveKernel(&wrong)
		if !s.handsOver() {
			return s, wrong.Err()
		}
	}
	s.resolveScheduling(&wrong, cmp.Or(hpus, MaxHPUs))
	s.checkHandlers(&wrong)
	wrong = append(wrong, s.Resources.Check(&s.Handlers)...)
	return s, wrong.Err()
}

func (s *ContextSpec) resolveName(wrong *spin.Problems) {
	switch {
	case s.Name == "":
		wrong.Add("name", "a context needs a name")
	case strings.ContainsFunc(s.Name, func(r rune) bool { return !unicode.IsPrint(r) }):
		wrong.Add("name", "%q has characters that cannot be printed", s.Name)
	}
}

func (s *ContextSpec) resolveRulesets(wrong *spin.Problems) {
	s.Rulesets = slices.Clone(s.Rulesets)
	n := len(s.Rulesets)
	switch {
	case s.HostActivated && n > 0:
		wrong.Add("rulesets", "a triggered context has none: the host activates it")
	case !s.HostActivated && n == 0:
		wrong.Add("rulesets", "no packet would ever match: give rulesets, %s", s.whatMatches())
	case n > matcher.MaxRulesets:
		wrong.Add("rulesets", "%w: %d rulesets: want 1 to %d", ErrTable, n, matcher.MaxRulesets)
	}
	for i := range s.Rulesets {
		if err := s.Rulesets[i].Validate(); err != nil {
			wrong.Add(fmt.Sprintf("rulesets[%d]", i), "%w", err)
		}
	}
	switch last := s.First + n - 1; {
	case s.HostActivated && s.First != 0:
		wrong.Add("first", "a triggered context has no rulesets to number")
	case s.First < 0 || s.First > 0 && last >= matcher.MaxRulesets:
		wrong.Add("first", "ruleset numbers %d to %d: want 0 to %d", s.First, last, matcher.MaxRulesets-1)
	}
	if s.Numbers == nil {
		return
	}
	if s.First != 0 {
		wrong.Add("first", "ruleset number %d and Numbers are both given: want only one", s.First)
	} else if err := checkNumbers(s.Numbers, n); err != nil {
		wrong.Add("first", "%w", err)
	}
	s.Numbers = slices.Clone(s.Numbers)
}

// whatMatches is what to do for a context that has no rulesets.
func (s *ContextSpec) whatMatches() string {
	switch {
	case s.Kernel == nil:
		return "or triggered: true for a host-activated context"
	case s.Kernel.Object != nil && s.Kernel.Object.Messages():
		return `such as "m: slmp"`
	}
	return `such as "echo: udp(7)"`
}

// checkNumbers checks the numbers of a context's rulesets.
func checkNumbers(numbers []int, rulesets int) error {
	if len(numbers) != rulesets {
		return fmt.Errorf("%d numbers for %d rulesets", len(numbers), rulesets)
	}
	for i, s := range numbers {
		if s < 0 || s >= matcher.MaxRulesets {
			return fmt.Errorf("ruleset number %d: want 0 to %d", s, matcher.MaxRulesets-1)
		}
		if slices.Contains(numbers[:i], s) {
			return fmt.Errorf("ruleset number %d appears twice", s)
		}
	}
	return nil
}

// resolveFormat finds the message format. It stays nil if the rulesets do not say.
func (s *ContextSpec) resolveFormat(wrong *spin.Problems) {
	if s.HostActivated {
		if s.Format != nil || s.Protocol != nil {
			wrong.Add("format", "a triggered context has none, nor a protocol: its messages are not packets")
		}
		s.Format = hostFormat()
		s.Held = -1
		s.Checksums = hpu.VerifyNone
		return
	}
	if s.Format != nil {
		if err := s.Format.Validate(); err != nil {
			wrong.Add("format", "%w", err)
		}
		return
	}
	if len(s.Rulesets) == 0 {
		return
	}
	first := &s.Rulesets[0]
	for _, r := range s.Rulesets {
		if r.Format != first.Format {
			wrong.Add("format", "rulesets %s and %s have different message formats, %q and %q: name one", first.Name, r.Name, first.Format, r.Format)
			return
		}
	}
	s.Format = matcher.FormatByName(cmp.Or(first.Format, "packet")) // or the ruleset is not valid
}

// resolveScheduling resolves what is about HPUs, credit and overload.
func (s *ContextSpec) resolveScheduling(wrong *spin.Problems, hpus int) {
	if !s.HostActivated {
		*wrong = append(*wrong, loader.CheckPolicy(s.Policy, s.Sequence, s.VHPUs, s.Format)...)
	}
	if s.Overload != OverloadDrops && s.Overload != OverloadSpills {
		wrong.Add("overload", "%d: want OverloadDrops or OverloadSpills", int(s.Overload))
	}
	all := uint64(math.MaxUint64) >> (64 - hpus)
	if s.CoreMask = cmp.Or(s.CoreMask, all); s.CoreMask&^all != 0 {
		wrong.Add("hpus", "%w", noSuchHPU(formatHPUs(s.CoreMask), hpus))
	}
	wrong.Between("credits", s.Credits, 1, MaxRing)
	wrong.Between("share", s.Share, 1, MaxShare)
	wrong.Between("messages", s.Messages, 1, bpf.MaxBuckets)
	s.Share = cmp.Or(s.Share, 1)
	s.Messages = cmp.Or(s.Messages, DefaultMessages)
	switch {
	case s.HostActivated:
		const none = "a triggered context has none: no packets come"
		if s.Credits > 0 {
			wrong.Add("credits", none)
		}
		if s.Overload == OverloadSpills {
			wrong.Add("overload", none)
		}
		if s.Policy == BlockedRR {
			wrong.Add("policy", "blocked-rr schedules packets, and a triggered context has none")
		}
	case s.Format != nil && len(s.Format.Key) == 0:
		s.Policy = ByPacket // every packet is a message
	}
}

// checkHandlers checks that handlers can do with the format.
func (s *ContextSpec) checkHandlers(wrong *spin.Problems) {
	f := s.Format
	if f == nil || f.Ends() {
		return
	}
	if s.Handlers.Payload == nil {
		wrong.Add("handler", "there is no payload handler, and format %s has packets only", f.Name)
	}
	if len(f.Key) > 0 && (s.Handlers.Header != nil || s.Handlers.Completion != nil) {
		wrong.Add("handler", "messages of format %s never end: there can be no header and no completion handler", f.Name)
	}
	if s.State != 0 {
		wrong.Add("handler", "state is kept for each message, and messages of format %s never end", f.Name)
	}
	if s.Binder != nil || s.Window != nil || s.Events != nil {
		wrong.Add("handler", "messages are put into windows, and format %s has none that begin and end, as those of slmp do", f.Name)
	}
}

// ParseHPUs reads a core mask as a list, such as "0-3,8", for a NIC with hpus HPUs
// (0: unknown).
func ParseHPUs(list string, hpus int) (mask uint64, err error) {
	hpus = cmp.Or(hpus, MaxHPUs)
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(strings.TrimSpace(part), "-")
		if !isRange {
			last = first
		}
		lo, err1 := strconv.ParseUint(first, 10, 8)
		hi, err2 := strconv.ParseUint(last, 10, 8)
		if err1 != nil || err2 != nil || lo > hi {
			return 0, fmt.Errorf(`%q: want a list such as "0-3,8"`, list)
		}
		if int(hi) >= hpus {
			return 0, noSuchHPU(list, hpus)
		}
		for h := lo; h <= hi; h++ {
			mask |= 1 << h
		}
	}
	return mask, nil
}

func noSuchHPU(list string, hpus int) error {
	return fmt.Errorf("%q: want HPUs 0 to %d", list, hpus-1)
}

// formatHPUs writes what ParseHPUs reads.
func formatHPUs(mask uint64) string {
	var parts []string
	for mask != 0 {
		lo := bits.TrailingZeros64(mask)
		n := bits.TrailingZeros64(^(mask >> lo))
		part := strconv.Itoa(lo)
		if n > 1 {
			part += "-" + strconv.Itoa(lo+n-1)
		}
		parts = append(parts, part)
		mask &^= math.MaxUint64 >> (64 - n) << lo
	}
	return strings.Join(parts, ",")
}
